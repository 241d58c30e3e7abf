"""Everything that needs a GPU, in one run of at most `--seconds`: tests, parity, and figures beside torch's own.

Each part runs in a process of its own with a limit of its own: one that fails or hangs costs its own figures alone. The
result file is written anew after each part. `--device cpu` runs every part at small sizes, to find typing errors where
there is no GPU.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, Any

import _gpu_parts as training
import _gpu_serving as inference
from _report import hardware

# Each part, and the most seconds that it may take.
PARTS = {
    "machine": (training.machine, 20),
    "suite": (training.suite, 150),
    "parity": (training.parity, 90),
    "serving": (inference.serving, 120),
    "grouped": (inference.grouped, 30),
    "step_time": (training.step_time, 150),
    "cuda_graphs": (training.cuda_graphs, 60),
    "attention": (training.attention, 60),
    "offload": (training.offload, 90),
}


def main() -> None:
    """Runs one part, or all of them."""
    args = _arguments()
    if args.part:
        run, _ = PARTS[args.part]
        print("RESULT " + json.dumps(run(args.device)))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit ends the part that runs, too
    start, out = time.monotonic(), pathlib.Path(args.out)
    results: dict[str, Any] = {"about": hardware(), "device": args.device}
    for name in args.parts.split(",") if args.parts else PARTS:
        left = args.seconds - (time.monotonic() - start)
        limit = min(PARTS[name][1], left)
        results[name] = _run(name, args.device, limit) if limit > 5 else "left out: no time is left"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {json.dumps(results[name])[:400]}", flush=True)
    print(f"wrote {out} in {time.monotonic() - start:.0f} s")


def _run(name: str, device: str, limit: float) -> Any:
    command = [sys.executable, __file__, "--part", name, "--device", device]
    start = time.monotonic()
    # Files, as a process that a part left behind would keep a pipe open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = _code_of(command, out, err, limit)
        output, errors = _text(out), _text(err)
    if code is None:
        return {"error": f"stopped after {limit:.0f} s", "stderr": errors[-1500:]}
    found = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if not found:
        return {"error": f"exit code {code}", "stderr": errors[-3000:]}
    return json.loads(found[-1].removeprefix("RESULT ")) | {"part seconds": round(time.monotonic() - start, 1)}


def _code_of(command: list[str], out: IO[str], err: IO[str], limit: float) -> int | None:
    """Runs a command in a session of its own; the exit code, or None if it was stopped. No process of it is left."""
    process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Also the processes that the part has started, which would hold the device: its tests, say.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=470.0, help="of the whole run")
    parser.add_argument("--out", default="benchmarks/results/gpu.json")
    parser.add_argument("--parts", default="", help=f"names with commas, of {', '.join(PARTS)}")
    parser.add_argument("--part", default="", help="runs this part here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
