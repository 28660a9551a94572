// Lets the search work in pages that are opened as files. There a browser starts no Worker, in which the
// search runs; this class runs the worker's script in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const post = (target, data) => target.dispatchEvent(new MessageEvent("message", {data}));
      inside.postMessage = (data) => post(this, data);
      this.terminate = () => frame.remove();
      this.loaded = new Promise((resolve) => {
        const script = inside.document.createElement("script");
        script.src = new URL(url, location);
        script.onload = resolve;
        inside.document.body.append(script);
      });
      this.postMessage = (data) => this.loaded.then(() => post(inside, data));
    }
  };
}
