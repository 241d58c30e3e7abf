"""The engine beside llama.cpp on one GGUF file: processor time of decode, prompts, eight sequences and the first token.

    python -m venv llama && llama/bin/pip install xllamacpp
    python benchmarks/bench_llama_cpp.py model.gguf --llama llama/bin/python --out x.md
    python benchmarks/bench_llama_cpp.py model.gguf --llama llama/bin/python --kind Q8_0 --rounds 3 --first 0

With `--kind` the weights are first written in another kind of blocks into a file of their own. In Q4_K, rows that 256
does not divide have Q5_0, and embeddings Q8_0, as in llama.cpp's own files. The rounding is plain, since times do not
depend on values.

Each peer is a process with one thread that has loaded the file, and answers requests of random tokens, greedily, one
peer after the other. Times are processor times of the process. The time of a drawn token is the difference between a
long and a short completion. The first token is that of a new process, which has built its C++ before.
"""

import argparse
import json
import os
import pathlib
import random
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

CONTEXT, PROMPT, SHORT, LONG, MANY = 2048, 900, 2, 66, 8
Answer = Callable[[Sequence[list[int]], int], int]


def main() -> None:
    """Measures and reports; with `--serve` it is a peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file of a Llama")
    parser.add_argument("--llama", help="a Python that has xllamacpp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first", type=int, default=3, help="cold starts of each peer")
    parser.add_argument("--kind", choices=[*_ENCODERS], help="blocks of linear layers (default: the file's own)")
    parser.add_argument("--out", default="")
    parser.add_argument("--serve", choices=["float32", "int8", "llama"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind:
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory) / f"{pathlib.Path(args.model).stem}.{args.kind}.gguf"
            write_kind(args.model, path, args.kind)
            args.model = str(path)
            return compare(args)
    if args.serve:
        answer_requests((serve_llama if args.serve == "llama" else serve_shardfn)(args.model, args.serve))
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    """Lets all peers answer the requests in turns."""
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    from _report import publish, table

    pythons = {"float32": sys.executable, "int8": sys.executable} | ({"llama": args.llama} if args.llama else {})
    peers = {name: Peer(name, python, args.model) for name, python in pythons.items()}
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in peers}
    for i in range(args.rounds):
        for name, peer in peers.items():
            for what, value in peer.measure(i).items():
                seconds[name].setdefault(what, []).append(value)
    for peer in peers.values():
        peer.close()
    for _ in range(args.first):
        for name, python in pythons.items():
            seconds[name].setdefault("first token of a cold start, s", []).append(time_first(name, python, args.model))
    rows = []
    for what in seconds["int8"]:
        middle = {name: statistics.median(x[what]) for name, x in seconds.items()}
        ratios = [f"{middle[name] / middle['llama']:.2f}" if "llama" in middle else "" for name in ("float32", "int8")]
        spread = [f"{min(x[what]):.2f} .. {max(x[what]):.2f}" for x in seconds.values()]
        rows.append([what, *(f"{x:.2f}" for x in middle.values()), *ratios, "; ".join(spread)])
    head = ["processor time", *(f"activations {x}" if x != "llama" else "llama.cpp" for x in peers)]
    head += ["float32 over llama.cpp", "int8 over llama.cpp", "least .. most of each"]
    note = f"{pathlib.Path(args.model).name}, one thread each, {args.rounds} rounds, medians\n\n"
    note += count_bytes(args.model)
    publish("The engine beside llama.cpp on one GGUF file", f"{note}\n\n{table(head, rows)}", out=args.out)


def count_bytes(model: str) -> str:
    """Returns the bytes of weights that a drawn token reads, beside those of the file."""
    from shardfn.core import tree_leaves
    from shardfn.inference import decoder
    from shardfn.interop import GGUFFile, gpt_from_gguf

    config, params = gpt_from_gguf(model, keep_codes=True, batch_invariant=True)
    served = sum(x.numel() * x.element_size() for x in tree_leaves(decoder(config).pack(_read_all(params))))
    file = sum(entry.num_bytes for entry in GGUFFile(model).values())
    return f"Weights served: {served / 2**20:.1f} MiB, and {file / 2**20:.1f} MiB in the file ({served / file:.2f})"


def _read_all(params: Any) -> Any:
    from shardfn.core import tree_map

    return tree_map(lambda leaf: leaf.full(), params)


def _encode_q5_0(x: Any) -> Any:
    """Blocks of 32: a scale, 32 fifth bits, and 16 bytes of nibbles."""
    import torch

    parts = x.unflatten(1, (-1, 32))
    scale = (parts.abs().amax(-1, keepdim=True) / 15).half()
    q = (parts / scale.float().clamp_min(1e-9)).round().clamp(-16, 15).to(torch.int64) + 16
    high = ((q >> 4) << torch.arange(32)).sum(-1, keepdim=True).to(torch.int32)
    nibbles = ((q[..., :16] & 15) | (q[..., 16:] & 15) << 4).to(torch.uint8)
    return torch.cat([scale.view(torch.uint8), high.view(torch.uint8), nibbles], -1).flatten(1)


def _encode_q8_0(x: Any) -> Any:
    from shardfn import kernels

    return kernels.quantize_blocks(x, "int8")


def _encode_q4_k(x: Any) -> Any:
    """Blocks of 256: two scales, 8 scales and least values of 6 bits, and 128 bytes of nibbles."""
    import torch

    if x.shape[1] % 256:
        return _encode_q5_0(x)
    parts = x.unflatten(1, (-1, 8, 32))
    least = (-parts.amin(-1)).clamp_min(0)
    step = (parts.amax(-1) + least) / 15
    d, m = ((y.amax(-1, keepdim=True) / 63).half() for y in (step, least))
    a, b = ((y / z.float().clamp_min(1e-9)).round().clamp(0, 63).to(torch.int64) for y, z in ((step, d), (least, m)))
    scale = (d.float() * a)[..., None].clamp_min(1e-9)
    q = ((parts + (m.float() * b)[..., None]) / scale).round().clamp(0, 15).to(torch.int64)
    six = [
        a[..., :4] | a[..., 4:] >> 4 << 6,
        b[..., :4] | b[..., 4:] >> 4 << 6,
        a[..., 4:] & 15 | (b[..., 4:] & 15) << 4,
    ]
    pairs = q.unflatten(-2, (4, 2))
    nibbles = (pairs[..., 0, :] | pairs[..., 1, :] << 4).flatten(-2)
    whole = [d.view(torch.uint8), m.view(torch.uint8), *(y.to(torch.uint8) for y in (*six, nibbles))]
    return torch.cat(whole, -1).flatten(1)


# Kinds, with the number of the kind in a file.
_ENCODERS: dict[str, Callable[[Any], Any]] = {"Q8_0": _encode_q8_0, "Q5_0": _encode_q5_0, "Q4_K": _encode_q4_k}
_NUMBERS = {"Q8_0": 8, "Q5_0": 6, "Q4_K": 12}


def write_kind(model: str, path: pathlib.Path, kind: str) -> None:
    """Writes a file with the same settings, whose weights of linear layers are in another kind."""
    import torch

    from shardfn.interop import GGUFFile
    from shardfn.interop._gguf import _HeaderParser

    file, ends = GGUFFile(model), list[int]()

    class Parser(_HeaderParser):
        def _parse_tensors(self, num: int, alignment: int) -> Any:
            ends.append(self._at)
            return super()._parse_tensors(num, alignment)

    Parser(file.path, file._data).parse()
    head, body = bytearray(file._data[: ends[0]]), bytearray()
    for name, entry in file.items():
        if len(entry.shape) == 2 and name.endswith(".weight"):
            own = "Q8_0" if kind == "Q4_K" and name in ("token_embd.weight", "output.weight") else kind
            made = _ENCODERS[own](file.load(name))
            number = _NUMBERS["Q5_0" if own == "Q4_K" and entry.shape[1] % 256 else own]
        else:
            made, number = file.load(name).view(torch.uint8), 0
        head += struct.pack("<Q", len(name.encode())) + name.encode() + struct.pack("<I", len(entry.shape))
        head += struct.pack(f"<{len(entry.shape)}QIQ", *reversed(entry.shape), number, len(body))
        body += made.contiguous().numpy().tobytes()
        body += bytes(-len(body) % 32)
    path.write_bytes(bytes(head) + bytes(-len(head) % 32) + body)


class Peer:
    """A process that answers each line of its input with the processor time of the answer, in seconds."""

    def __init__(self, name: str, python: str, model: str) -> None:
        self._process = subprocess.Popen(
            [python, __file__, model, "--serve", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_env(),
        )
        self._read_line()
        self._ask(1, 4, 4, 0)
        self._ask(1, PROMPT, SHORT, 1)
        self._ask(MANY, 16, 12, 2)

    def measure(self, number: int) -> dict[str, float]:
        """Returns milliseconds by name."""
        place = 100 * (number + 1)
        drawn = self._ask(1, 16, LONG, place) - self._ask(1, 16, SHORT, place + 1)
        prompt = self._ask(1, PROMPT, 1, place + 2)
        many = self._ask(MANY, 16, LONG, place + 3) - self._ask(MANY, 16, SHORT, place + 4)
        return {
            "ms a drawn token, one sequence": 1e3 * drawn / (LONG - SHORT),
            f"ms a token of a prompt of {PROMPT}": 1e3 * prompt / PROMPT,
            f"ms a drawn token, {MANY} sequences": 1e3 * many / (LONG - SHORT) / MANY,
        }

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()

    def _ask(self, *request: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return float(self._read_line())

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("PEER "):
                return line.split()[1]
        raise RuntimeError("the peer has ended")


def _env() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def answer_requests(answer: Answer) -> None:
    """Answers each line of stdin: the number of prompts, their tokens, the tokens to draw, and a seed."""
    print("PEER 0", flush=True)
    for line in sys.stdin:
        num, length, drawn, seed = json.loads(line)
        draw = random.Random(seed)
        prompts = [[draw.randrange(1000, 30000) for _ in range(length)] for _ in range(num)]
        start = time.process_time()
        made = answer(prompts, drawn)
        seconds = time.process_time() - start
        assert made == num * drawn, (made, num, drawn)
        print("PEER", seconds, flush=True)


def serve_shardfn(model: str, activations: str) -> Answer:
    """The engine, in the file's codes."""
    import torch

    from shardfn.inference import Engine, Sampling, decoder, limits_of
    from shardfn.interop import gpt_from_gguf

    torch.set_num_threads(1)
    config, params = gpt_from_gguf(model, keep_codes=True, batch_invariant=True)
    rounding: Any = None if activations == "float32" else activations
    made = decoder(config, quantization="int4", activations=rounding)
    limits = limits_of(made, context=CONTEXT, cache_bytes=1 << 30)
    engine = Engine(made, params, limits=limits)

    def answer(prompts: Sequence[list[int]], num: int) -> int:
        how = Sampling(max_tokens=num, temperature=0.0)
        return sum(len(c.tokens) for c in engine.generate(list(prompts), how))

    return answer


def serve_llama(model: str, name: str) -> Answer:
    """llama.cpp's server, in this process."""
    del name
    import xllamacpp  # pyright: ignore[reportMissingImports]

    options = xllamacpp.CommonParams()
    options.model.path = model
    options.n_ctx, options.n_parallel, options.n_batch, options.n_ubatch = CONTEXT * MANY, MANY, 512, 512
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    options.cache_prompt, options.n_threads_http = False, MANY
    server = xllamacpp.Server(options)
    print(xllamacpp.get_system_info(), file=sys.stderr)

    def answer(prompts: Sequence[list[int]], num: int) -> int:
        made = list[int]()
        how = {"n_predict": num, "max_tokens": num, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}

        def ask(prompt: list[int]) -> None:
            made.append(server.handle_completions({"prompt": prompt, **how})["usage"]["completion_tokens"])

        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(made)

    return answer


_FIRST = """
import sys, xllamacpp
options = xllamacpp.CommonParams()
options.model.path, options.n_ctx = sys.argv[1], 2048
options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
message = {"role": "user", "content": "Name a colour."}
xllamacpp.Server(options).handle_chat_completions({"messages": [message], "max_tokens": 1})
"""


def time_first(name: str, python: str, model: str) -> float:
    """Returns the processor time of a new process that draws one token of a chat, in seconds."""
    command = [python, "-c", _FIRST, model]
    if name != "llama":
        command = [python, "-m", "shardfn", "generate", model, "Name a colour.", "--chat", "--max-tokens", "1"]
        command += ["--context", "2048", "--activations", name]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, env=_env())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
