// A site that is read from a folder may start no Worker, and the search is one. This class runs a
// worker's script in a hidden frame instead: what is posted to either side is dispatched on the other.
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
