"""Run benchmark cases on this machine's GPU, in processes of their own, and write results.

    python -m dev.benchmarks [--host TREE] [--out DIR] [--only NAME,NAME] [--minutes N] [--work DIR]
    [--smoke]

Cases go on after one that failed; its file says why. Model files and graph stores stay in the work
folder, so a second call (another `--only`) starts where the first ended. `--smoke` runs everything
narrow on a CPU: it shows that the benchmark works and claims nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .cases import CASES
from .lab import ChildError, Lab
from .results import case_name, collect, table, write_case
from .users_run_case import joint_table

RESULTS = Path(__file__).resolve().parent / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run; the exit code is the number of cases that failed."""
    options = _parser().parse_args(argv)
    if options.collect:
        print("\n".join(joint_table(options.out)))
        print(f"{len(collect(options.out))} headline figures")
        return 0
    if not (options.host / "main.py").is_file():
        raise SystemExit(f"--host must be a ComfyUI tree, got {options.host}")
    names = options.only.split(",") if options.only else list(CASES)
    unknown = sorted(set(names) - set(CASES))
    if unknown:
        raise SystemExit(f"--only must name cases of {', '.join(CASES)}, got {', '.join(unknown)}")
    work = options.work or Path(tempfile.gettempdir()) / (
        "warmgraph-bench-smoke" if options.smoke else "warmgraph-bench"
    )
    out = options.out
    if options.smoke and out == RESULTS:
        out = work / "results"
    seconds = None if options.minutes is None else options.minutes * 60
    lab = Lab(options.host, work, smoke=options.smoke, seconds=seconds)
    failed = sum(not run_case(lab, name, out) for name in names)
    if options.clean:
        shutil.rmtree(work / "models", ignore_errors=True)
    print("\n".join(["", *table(out, names, lab.facts.get("version"))]))
    return failed


def run_case(lab: Lab, name: str, out: Path) -> bool:
    """Run one case and write its file; returns whether it came to a result."""
    about = "" if lab.smoke else f" (about {CASES[name].seconds} s)"
    print(f"{name}{about} ...", flush=True)
    begin = time.perf_counter()
    try:
        case = {"ok": True, **CASES[name].run(lab)}
    except ChildError as failure:
        case = {"ok": False, "reason": str(failure), "partial": failure.partial}
        if failure.stopped and lab.left() < 5:
            case["reason"] = f"the run's time was up (--minutes): {failure}"
    seconds = round(time.perf_counter() - begin, 1)
    facts = lab.facts
    write_case(
        out,
        case_name(name, facts.get("version")),
        {
            "gpu": facts.get("gpu"),
            "torch": facts.get("torch"),
            "host": f"ComfyUI {facts.get('version')}",
            "smoke": lab.smoke,
            "seconds": seconds,
            **case,
        },
    )
    outcome = "; ".join(case.get("lines", ["ok"])) if case["ok"] else f"FAILED: {case['reason']}"
    print(f"  {seconds:.0f} s: {outcome}", flush=True)
    return bool(case["ok"])


def _known_tree() -> Path:
    """The tree that WARMGRAPH_HOST names, else the one that `python dev` installs."""
    return Path(os.environ.get("WARMGRAPH_HOST") or RESULTS.parents[2] / ".host" / "0.30.0")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dev.benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="cases: " + ", ".join(f"{name} ({case.seconds} s)" for name, case in CASES.items()),
    )
    parser.add_argument("--host", type=Path, default=_known_tree(), help="the ComfyUI tree")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--only", default="", help="cases to run, separated by commas")
    parser.add_argument("--minutes", type=float, help="start nothing after this, stop what runs")
    parser.add_argument("--work", type=Path, help="folder of model files, stores and logs")
    parser.add_argument("--smoke", action="store_true", help="narrow models on the CPU, no claims")
    parser.add_argument("--collect", action="store_true", help="only remake headline.json")
    parser.add_argument("--clean", action="store_true", help="delete the model files at the end")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
