"""Real gloo ranks behind a slow network: each in a network namespace of its own, joined by links of a given rate.

    rank 0 [eth0 tbf]--[tbf port 0]              Every rank sends and receives at `rate`, both at once, like machines
    rank 1 [eth0 tbf]--[tbf port 1] bridge       on a switch. All of it, the bridge too, lies in namespaces of its own:
    ...                                          the machine's network is not touched, and no address can collide.

As a program it prints the measured link and runs a script on every rank, with torch's environment (RANK, WORLD_SIZE,
MASTER_ADDR, ...) set:

    python benchmarks/slow_link.py --ranks 2 --rate 1gbit
    python benchmarks/slow_link.py --ranks 2 --rate 100mbit -- examples/train.py --steps 3

As a library: `with Link(ranks=2, rate="1gbit") as link: link.run("script.py", [...])`, or `Group(..., link=link)` of
`_pairs.py`. Needs root, `ip` and `tc` (Debian's iproute2). Its namespaces are removed at the end, also after SIGINT,
SIGTERM and SIGHUP; those of a run that was killed (SIGKILL) are removed by the next one.
"""

import argparse
import atexit
import contextlib
import ctypes
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import IO, Any

INTERFACE = "eth0"
PORT = 29500
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
CHECKED = 4 * 2**20
_NETNS = pathlib.Path("/run/netns")
_PREFIX = "sflink"
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Unavailable(RuntimeError):
    """This machine cannot make namespaces or shape links; the message has the reason."""


def why_unavailable() -> str:
    """Why no slow link can be made here; empty where it can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found: install iproute2 (apt-get install iproute2)" if missing else ""


def bits_per_second(rate: str) -> float:
    """The bits per second of a rate, infinite for "unlimited".

    Raises:
        ValueError: it is no rate.

    Example:
        >>> bits_per_second("100mbit")
        100000000.0
    """
    if rate == "unlimited":
        return float("inf")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if not found:
        raise ValueError(f"rate {rate!r}: use a number with kbit, mbit or gbit, as in 1gbit, or unlimited.")
    return float(found[1]) * UNITS[found[2]]


def enter(namespace: str) -> None:
    """Moves the calling thread, and all threads that it starts from now on, into a namespace of a `Link`."""
    with (_NETNS / namespace).open() as file:
        if _LIBC.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


class Link:
    """Nodes on one switch, whose ports carry `rate` each way. A node is a namespace of `per_node` ranks.

    Args:
        ranks: number of ranks.
        rate: rate of each port, as tc has it, or "unlimited".
        per_node: number of ranks of a node. Ranks of a node do not use the switch.
        delay: time that a packet takes longer, as tc has it, for example "0.2ms".

    Attributes:
        namespaces: name of the namespace of each rank.
        interface: the interface that gloo is to use inside of them.
        master: the address of rank 0.

    Raises:
        Unavailable: (on entering) not root, or iproute2 is missing, or the kernel refuses.
    """

    interface = INTERFACE
    master = "10.0.0.1"

    def __init__(self, ranks: int = 2, rate: str = "1gbit", *, per_node: int = 1, delay: str = "") -> None:
        self.ranks, self.rate, self.bits, self._delay = ranks, rate, bits_per_second(rate), delay
        base = f"{_PREFIX}-{os.getpid()}-{_started(os.getpid())}-{time.monotonic_ns() % 10**6}"
        self._hub = f"{base}-hub"
        self._nodes = [f"{base}-r{node}" for node in range(-(-ranks // per_node))]
        self.namespaces = [self._nodes[rank // per_node] for rank in range(ranks)]
        self._before: dict[int, Any] = {}
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Link":
        """Makes the namespaces."""
        if reason := why_unavailable():
            raise Unavailable(reason)
        remove_stale()
        atexit.register(self.close)
        self._catch_signals()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends running processes and removes the namespaces."""
        self.close()

    def close(self) -> None:
        """Ends running processes and removes the namespaces; may be called twice."""
        _end(self._running)
        for name in (*self._nodes, self._hub):
            if (_NETNS / name).exists():
                subprocess.run(["ip", "netns", "del", name], check=False)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        atexit.unregister(self.close)

    def run(
        self, script: str, args: Sequence[str] = (), *, capture: bool = False, timeout: float | None = None
    ) -> list[str]:
        """Runs a script (a path, or a module's name) on every rank and waits for all of them.

        Args:
            script: path of a Python file, or the dotted name of a module.
            args: its arguments.
            capture: whether to return the ranks' output; else rank 0 prints to our output, the others are quiet.
            timeout: seconds after which all ranks are ended.

        Returns:
            The output of each rank, with `capture`; else nothing.

        Raises:
            RuntimeError: a rank failed; the others are ended.
            TimeoutError: it took too long.
        """
        what = [script] if script.endswith(".py") else ["-m", script]
        command = [sys.executable, *what, *args]
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in self.namespaces]
            for rank, name in enumerate(self.namespaces):
                out = None if rank == 0 and not capture else files[rank]
                line, env = ["ip", "netns", "exec", name, *command], self.environment(rank)
                self._running.append(subprocess.Popen(line, env=env, stdout=out, preexec_fn=_die_with_parent))
            try:
                self._wait(timeout)
            finally:
                _end(self._running)
                self._running.clear()
            return [_content(file) for file in files] if capture else []

    def environment(self, rank: int) -> dict[str, str]:
        """The environment of one rank: torch's rendezvous, gloo's interface, one thread."""
        mine = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks, "MASTER_PORT": PORT}
        fixed = {"MASTER_ADDR": self.master, "GLOO_SOCKET_IFNAME": INTERFACE, "TP_SOCKET_IFNAME": INTERFACE}
        return (
            {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            | os.environ
            | fixed
            | {k: str(v) for k, v in mine.items()}
        )

    def check(self) -> dict[str, Any]:
        """Seconds of an all_reduce of 4 MiB over this link, and those that the rate allows.

        A ring all_reduce of M bytes over N ranks sends 2 M (N - 1) / N from each.
        """
        printed = self.run(str(pathlib.Path(__file__).resolve()), ["--measure"], capture=True, timeout=120)
        seconds = json.loads(printed[0].splitlines()[-1])
        theory = 2 * CHECKED * (self.ranks - 1) / self.ranks * 8 / self.bits
        return {"rate": self.rate, "ranks": self.ranks, "seconds": seconds, "theory": theory}

    def _build(self) -> None:
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "switch", "addrgenmode", "none", "up")
        for node, name in enumerate(self._nodes):
            port = f"port{node}"
            _ip("netns", "add", name)
            _ip("-n", self._hub, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", INTERFACE, "addrgenmode", "none", "up")
            _ip("-n", name, "addr", "add", f"10.0.0.{node + 1}/24", "dev", INTERFACE)
            _ip("-n", self._hub, "link", "set", port, "addrgenmode", "none", "master", "switch", "up")
            self._shape(name, INTERFACE, self._delay)
            self._shape(self._hub, port)

    def _shape(self, namespace: str, interface: str, delay: str = "") -> None:
        if delay and self.rate != "unlimited":
            raise ValueError(f"Link(rate={self.rate!r}, delay={delay!r}): a delayed link must be unlimited.")
        if delay:
            line = ["tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "netem", "delay", delay]
            _call([*line, "limit", "100000"])
        if self.rate == "unlimited":
            return
        # A burst of 1 ms, and never below one packet of 64 KiB, which the kernel hands over whole.
        burst = max(int(self.bits / 8 / 1000), 128 * 1024)
        shape = ["tbf", "rate", self.rate, "burst", str(burst), "latency", "50ms"]
        _call(["tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *shape])

    def _catch_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, _leave)

    def _wait(self, timeout: float | None) -> None:
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while any(p.poll() is None for p in self._running):
            self._raise_failed()
            if time.monotonic() > end:
                raise TimeoutError(f"the ranks did not end within {timeout} s")
            time.sleep(0.05)
        self._raise_failed()

    def _raise_failed(self) -> None:
        failed = [f"rank {r} ended with exit code {p.returncode}" for r, p in enumerate(self._running) if p.poll()]
        if failed:
            raise RuntimeError(f"{', '.join(failed)}; their messages are above.")


def remove_stale() -> list[str]:
    """Removes the namespaces of runs that no longer exist; returns their names."""
    found = _NETNS.glob(f"{_PREFIX}-*") if _NETNS.exists() else ()
    stale = [p.name for p in found if _started(int(p.name.split("-")[1])) != p.name.split("-")[2]]
    for name in stale:
        subprocess.run(["ip", "netns", "del", name], check=False)
    return sorted(stale)


def describe(check: dict[str, Any]) -> str:
    """One line about the findings of `Link.check`."""
    theory, seconds = check["theory"], check["seconds"]
    share = f", {seconds / theory:.3f} of it" if theory else ""
    allowed = f"{theory:.4f} s at that rate{share}" if theory else "no limit"
    return f"link of {check['rate']}, {check['ranks']} ranks: all_reduce of 4 MiB {seconds:.4f} s ({allowed})"


def main() -> None:
    """Makes a link, prints its rate, runs a script over it."""
    args = _arguments()
    if args.measure:
        _measure()
        return
    if reason := why_unavailable():
        print(f"skipped: {reason}")
        return
    with Link(args.ranks, args.rate) as link:
        print(describe(link.check()), flush=True)
        if args.command:
            link.run(args.command[0], args.command[1:], timeout=args.timeout)


def _measure() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seconds = []
    for _ in range(6):
        flat = torch.ones(CHECKED // 4)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(flat)
        seconds.append(time.perf_counter() - start)
    dist.destroy_process_group()
    # The first one also fills the bucket's burst and opens TCP's window.
    print(json.dumps(sorted(seconds[1:])[len(seconds) // 2 - 1]))


def _started(pid: int) -> str:
    # Field 22 of /proc/PID/stat: with it a process is known even when its number is used again.
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _ip(*args: str) -> None:
    _call(["ip", *args])


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip()}")


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="as tc has it: 1gbit, 100mbit; or unlimited")
    parser.add_argument("--timeout", type=float, default=None, help="seconds that the script may take")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help="after --: a script or a module, and its arguments")
    return parser.parse_args()


if __name__ == "__main__":
    main()
