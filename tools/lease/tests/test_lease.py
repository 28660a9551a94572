"""The lease: steps, answers, reports and packs, without a GPU."""

from __future__ import annotations

import contextlib
import importlib.metadata
import random
import sys
import time
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tools.lease import check, pack, report


@pytest.mark.parametrize(("question", "figure", "decision"), [
    ({"figure": "copies/1 x 8192/[BC]*", "over": "copies/1 x 8192/A*", "at_most": 0.985}, 0.9, "yes"),
    ({"figure": "copies/1 x 8192/[BC]*", "minus": "copies/1 x 8192/A*", "at_most": -2}, -1.0, "no"),
    ({"figure": "copies/1 x 8192/A*", "at_least": 10}, 10.0, "yes"),
    ({"figure": "copies/1 x 8192/A*", "at_least": 10.1}, 10.0, "no"),
    ({"figure": "copies/1 x 8192/A*", "over": "copies/2 x 8192/A*", "at_most": 1}, None, None),
], ids=["ratio", "difference", "least", "too little", "not measured"])  # fmt: skip
def test_an_answer(question: dict[str, Any], figure: float | None, decision: str | None) -> None:
    results = {"copies": {"1 x 8192": {"A cp.async": 10.0, "B box": 9.5, "C two boxes": 9.0}}}
    question |= {"question": "?", "then": "yes", "else": "no", "prediction": [9.9, 11]}
    (answer,) = report.answers([question], results)
    assert answer == {
        "question": "?", "prediction": [9.9, 11], "figure": figure, "decision": decision
    }  # fmt: skip
    text = report.markdown(RESULTS | {"answers": [answer]})
    assert ("9.9 to 11: WRONG" in text) == (figure is not None and figure < 9.9)


GPU = {
    "name": "GPU",
    "driver_version": "1",
    "clocks.max.sm": "1 MHz",
    "clocks.max.memory": "1 MHz",
    "power.limit": "700 W",
    "python": "3",
    "versions": {"torch": "2", "flashinfer-python": None},
}
LIMITS = {"read_bytes_per_s": 3e12, "copy_bytes_per_s": 3e12, "matmul_flops_per_s": 8e14}
RESULTS: dict[str, Any] = {"machine": GPU, "steps": {}, "results": {}, "answers": []}
WELL, BADLY, SLOW = "echo words", "echo words; exit 1", "sleep 60"


def test_the_report_of_a_contest() -> None:
    row = {
        "kind": "decode", "workload": "b1 x 8", "kv_bytes": 3e9, "flops": 1, "seconds": {"ours": 2e-3},
        "gauges": {"ours": {"mhz": 1500, "watts": 600}}, "absent": {"theirs": "does not compute"},
    }  # fmt: skip
    contest = {
        "peers": {"flash": "1.2", "other": None},
        "rows": [row],
        "not_measured": ["decode x"],
    }
    text = report.markdown(RESULTS | {"results": {"decode": contest, "limits": LIMITS}})
    cell = "2000.0 us, 1500 GB/s, 50%, 1500 MHz, 600 W, 1000 GB/s per GHz"
    assert f"| decode | b1 x 8 | {cell} |" in text
    assert "* other libraries: flash 1.2\n* theirs: does not compute\n* not measured" in text


def step(name: str, seconds: float = 20, **more: Any) -> dict[str, Any]:
    return {"name": name, "seconds": seconds, **more}


def test_steps(tmp_path: Path) -> None:
    """Steps that passed are not repeated. Steps that failed, were skipped or ran out of time are
    named."""
    modules = {"": "1", "new": "2"}
    (tmp_path / "copies").mkdir()
    steps = check.Steps(tmp_path, GPU, modules, copies=tmp_path / "copies")
    assert not steps.do(step("badly"), BADLY)
    assert not steps.do(step("slow", 0.2), SLOW)
    steps.leave_out("racecheck", "too old")
    assert not steps.do(step("skipped"), "echo 3 skipped in 2 s")
    assert steps.results["steps"]["skipped"]["ok"] is None
    measures = f"echo '{{\"x\": 1}}' > {steps.out('well')}; {WELL}"
    assert steps.do(step("well"), measures)
    assert steps.do(step("of all", contestants={}), WELL)
    assert not steps.went_well
    words = {name: step["last_words"] for name, step in steps.results["steps"].items()}
    assert words == {
        "badly": "words",
        "slow": "stopped after 0 s",
        "racecheck": "too old",
        "skipped": "3 skipped in 2 s",
        "well": "words",
        "of all": "words",
    }
    text = (tmp_path / "report.md").read_text()
    assert "| badly | FAILED |" in text and "| racecheck | left out |" in text
    assert "badly:\n\n```\nwords\n```" in text
    assert report.figures(steps.results["results"]) == {"well/x": 1}
    for name in ("report.json", "report.md"):
        assert (tmp_path / "copies" / name).read_text() == (tmp_path / name).read_text()
    summary = report.summary(steps.results, [step("badly", 7), step("well", 3), step("never", 5)])
    assert "proven or measured: well, of all" in summary
    assert "left, about 12 s: badly, never" in summary

    later = check.Steps(tmp_path, GPU, modules, seconds=0)
    assert report.figures(later.results["results"]) == {"well/x": 1}
    assert later.do(step("well"), measures) and not later.do(step("badly"), WELL)
    assert later.results["steps"]["badly"]["last_words"] == "0 s were left, and it takes 20"

    # Another variant counts for steps of all variants only.
    other = check.Steps(tmp_path, GPU, modules | {"new": "3"})
    assert not other.do(step("of all", contestants={}), BADLY)
    assert other.do(step("well"), measures)
    assert not check.Steps(tmp_path, GPU | {"name": "another"}, modules).results["steps"]


def test_a_step_is_continued_on_another_machine(tmp_path: Path) -> None:
    """From report.json alone, which has the results of what was cut off."""

    def command(steps: check.Steps) -> str:
        return (
            f"test -f '{steps.out('contest')}' || (echo '{{}}' > '{steps.out('contest')}'; exit 1)"
        )

    first = check.Steps(tmp_path / "run", GPU, {"": "1"})
    assert not first.do(step("contest"), command(first))
    (tmp_path / "run/contest.json").unlink()
    second = check.Steps(tmp_path / "run", GPU, {"": "1"})
    assert second.results["results"]["contest"] == {}
    assert not second.do(step("contest"), command(second))  # nothing was measured yet
    second.results["results"]["contest"] = {"peers": {}, "rows": []}
    assert second.do(step("contest"), command(second))


def test_a_step_leaves_no_process(tmp_path: Path) -> None:
    steps = check.Steps(tmp_path, GPU, {"": "1"})
    steps.do(step("short"), "sleep infinity & echo $!")
    process = Path("/proc", steps.results["steps"]["short"]["last_words"], "stat")
    for _ in range(6000):  # until it has ended
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if process.read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)
                continue
        return
    pytest.fail("it goes on")


class Recorded(check.Steps):
    """Steps that are not done."""

    def do(self, step: Any, command: str) -> bool:
        self.results["steps"][step["name"]] = {**step, "ok": True, "command": command}
        return True

    def leave_out(self, name: str, reason: str) -> None:
        self.results["steps"][name] = {"ok": None, "command": reason}


@pytest.mark.parametrize("key", ["command", "rehearsal"])
def test_order(key: str, tmp_path: Path) -> None:
    """What decides comes first, then the proofs of the kernels; the tables are the second part."""
    steps = Recorded(tmp_path, GPU, {"": "1", "new": "2"})
    names = ("python", "cores", "tools", "variants", "emulated_module")
    modules = {"": Path("today.so"), "stamps": Path("stamps.so")}
    found = {name: f"<{name}>" for name in names}
    check.check(steps, check.steps_of(), modules, found, key)
    done = steps.results["steps"]
    assert [*done][:9] == [
        *("import", "one order", "products", "limits", "copies", "decode", "prefill"),
        *("kernels for Hopper", "kernels"),
    ]
    assert [step["name"] for step in check.steps_of([2])][:2] == ["invariant", "table"]
    assert [step["name"] for step in check.steps_of([1, 2], ["in", "ta"])] == ["invariant", "table"]
    assert not any("{" in step["command"] for step in done.values())
    assert "--module stamps.so" in done["stamps"]["command"]
    assert "--native today.so" in done["kernels"]["command"]
    assert "--module today.so" in done["decode"]["command"]
    assert done["racecheck"]["ok"] is None
    if key == "command":
        portable = {
            name
            for name, x in done.items()
            if (x.get("environment") or {}).get("XLA_GPU_CUDA_KERNELS")
        }
        assert portable == {f"{tool}check, portable" for tool in ("mem", "race", "init", "sync")}
    else:
        assert done["memcheck, portable"]["command"] == "needs a GPU"


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pack of small files, for sources in another folder."""
    monkeypatch.setattr(pack, "ROOT", tmp_path / "sources")
    (tmp_path / "sources/shared_ffi/csrc").mkdir(parents=True)
    (tmp_path / "sources/CMakeLists.txt").write_text("project()")
    noise = random.Random(0)
    for name in ("variants/today/_native.so", "variants/new/_native.so", "packages/pytest.py"):
        path = tmp_path / "parts" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(noise.randbytes(2500))
    pack.write(tmp_path / "parts", tmp_path / "pack.tar.xz", "{}.{}".format(*sys.version_info))
    return tmp_path / "pack.tar.xz"


def test_the_sources_of_a_pack_know_their_version(tmp_path: Path) -> None:
    """Python asks the metadata of installed packages, and they are not installed."""
    pack.copy_metadata(tmp_path)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert (found.name, found.version) == (
        "xla-paged-attention",
        tomllib.loads((pack.ROOT / "pyproject.toml").read_text())["project"]["version"],
    )


def test_pack_round_trip(packed: Path, tmp_path: Path) -> None:
    target = tmp_path / "unpacked"
    manifest = pack.unpack(packed, target, "new")
    assert [*manifest["variants"]] == ["new", "today"]
    for path in (tmp_path / "parts").rglob("*.*"):
        assert (target / path.relative_to(tmp_path / "parts")).read_bytes() == path.read_bytes()
    assert [path.name for path in pack.paths(target)] == ["packages"]
    (target / "packages/pytest.py").unlink()
    pack.unpack(packed, target, "new")
    assert not (target / "packages/pytest.py").exists(), "unpacked a second time"


def test_a_pack_that_does_not_fit(packed: Path, tmp_path: Path) -> None:
    target, content = tmp_path / "unpacked", packed.read_bytes()
    with pytest.raises(SystemExit, match="no variant 'old'; it has new, today"):
        pack.unpack(packed, target, "old")
    packed.write_bytes(content[:-100])
    with pytest.raises(SystemExit, match="is damaged"):
        pack.unpack(packed, target, "today")
    packed.write_bytes(content)
    (tmp_path / "sources/CMakeLists.txt").write_text("project(changed)")
    with pytest.raises(SystemExit, match="other sources"):
        pack.unpack(packed, target, "today")


def test_a_pack_for_another_python(packed: Path, tmp_path: Path) -> None:
    pack.write(tmp_path / "parts", packed, "3.8")
    with pytest.raises(SystemExit, match=r"for Python 3\.8; this is 3\."):
        pack.unpack(packed, tmp_path / "unpacked", "today")


def test_a_variant_is_some_units_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other objects of a build are linked as they are."""
    link = f": && c++ -o {pack.LIBRARY} a/decode_X.dir/decode.cu.o cuda/run.cu.o b.cc.o && :"
    ran: list[str] = []

    def commands(command: list[str], **_: Any) -> str:
        name = command[-1]
        return "others\n" + (link if name == pack.LIBRARY else f"nvcc -MF {name}.d -o {name}")

    monkeypatch.setattr(pack.subprocess, "check_output", commands)
    monkeypatch.setattr(pack.subprocess, "run", lambda command, **_: ran.append(command))
    new = tmp_path / "new"
    pack.build_variant("XLA_GPU_STAMPS", ["decode_X."], tmp_path / "today", new)
    assert ran == [
        f"nvcc -MF {new / '1.o'}.d -o {new / '1.o'} -DXLA_GPU_STAMPS",
        f": && c++ -o {new / pack.LIBRARY} {new / '1.o'} cuda/run.cu.o b.cc.o && :",
    ]
    for definition, units in (("XLA_GPU_NO_SUCH", ["decode_X."]), ("XLA_GPU_STAMPS", ["other"])):
        with pytest.raises(SystemExit, match=rf"a header's definition and units; got {definition}"):
            pack.build_variant(definition, units, tmp_path / "today", new)


@pytest.mark.parametrize(("name", "fits"), [
    ("_native.abi3.so", True),
    ("_native.cpython-312-x86_64-linux-gnu.so", True),
    ("_native.cpython-311-x86_64-linux-gnu.so", False),
    (None, False),
])  # fmt: skip
def test_a_variant_for_another_python(name: str | None, fits: bool, tmp_path: Path) -> None:
    module = tmp_path / (name or "absent.abi3.so")
    if name:
        module.touch()
    with contextlib.nullcontext() if fits else pytest.raises(SystemExit, match=r"for Python 3\.12"):
        pack.check_tag(module, "3.12")


def test_a_part_of_a_wheel(tmp_path: Path) -> None:
    """The last pattern that a name matches decides. A program stays one."""
    names = ("lib/a.py", "lib/data/b.py", "lib/data/__init__.py", "lib/c.so")
    with zipfile.ZipFile(tmp_path / "lib.whl", "w") as wheel:
        for name in names:
            wheel.writestr(name, name)
        program = zipfile.ZipInfo("lib/bin/tool.py")
        program.external_attr = 0o100755 << 16
        wheel.writestr(program, "")
    pack.extract(tmp_path / "lib.whl", ("*.py", "!lib/data/*", "*/__init__.py"), tmp_path)
    assert (tmp_path / "lib/bin/tool.py").stat().st_mode & 0o111
    assert not (tmp_path / "lib/a.py").stat().st_mode & 0o111
    assert {str(x.relative_to(tmp_path)) for x in tmp_path.rglob("*.*") if x.is_file()} == {
        "lib.whl", "lib/a.py", "lib/data/__init__.py", "lib/bin/tool.py"
    }  # fmt: skip
