"""Everything that needs a GPU, in one run of at most `--seconds`: tests, parity, and figures beside torch's own.

Each part runs in a process of its own with a limit of its own: one that fails or hangs costs its own figures alone. The
result file is written anew after each part. `--device cpu` runs every part at small sizes, to find typing errors where
there is no GPU.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

from _gpu_parts import PARTS
from _report import hardware


def main() -> None:
    """Runs one part, or all of them."""
    args = _arguments()
    if args.part:
        run, _ = PARTS[args.part]
        print("RESULT " + json.dumps(run(args.device)))
        return
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
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as error:
        said = error.stderr or b""
        return {"error": f"stopped after {limit:.0f} s", "stderr": said.decode(errors="replace")[-1500:]}
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        return {"error": f"exit code {done.returncode}", "stderr": done.stderr[-3000:]}
    return json.loads(found[-1].removeprefix("RESULT ")) | {"part seconds": round(time.monotonic() - start, 1)}


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
