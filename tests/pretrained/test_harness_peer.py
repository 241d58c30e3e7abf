"""Covers `evaluate_tasks` beside lm-evaluation-harness's back end of transformers, and equal numbers in all runs."""

import pathlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardfn.core import key, make_mesh
from shardfn.data import ByteTokenizer
from shardfn.inference import Engine, decoder, limits_of
from shardfn.models import gpt
from shardfn.pretrained import LLM, evaluate_tasks
from shardfn.pretrained._harness import make_harness_model
from shardfn.pretrained._text import wrap_data_tokenizer
from shardfn.testing import distributed
from tests.pretrained.harness_tasks import TASKS, write_model, write_tasks

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]  # warnings of the harness
WORDS = pathlib.Path(__file__).parents[2].joinpath("docs", "serving.md").read_text(encoding="utf-8").split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    for name in ("lm_eval", "accelerate", "transformers"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("harness")
    write_model(folder, [" ".join(WORDS)], max_position_embeddings=200)
    write_tasks(folder, WORDS, num=9, long=12)  # some texts are longer than the context
    return folder


def samples_of(found: dict[str, Any]) -> dict[str, list[Any]]:
    """The answers of the model to each document."""
    return {
        name: [x["resps"] for x in sorted(rows, key=lambda x: x["doc_id"])] for name, rows in found["samples"].items()
    }


@pytest.fixture(scope="module")
def ours(folder: pathlib.Path) -> dict[int, dict[str, Any]]:
    made = dict[int, dict[str, Any]]()
    for batch in (1, 64):
        llm = LLM(str(folder), running=16)
        made[batch] = evaluate_tasks(llm, list(TASKS), include_path=str(folder), batch_size=batch)
    return made


def leaves(answers: Any) -> list[Any]:
    """All numbers and texts of answers, in order."""
    return [x for one in answers for x in leaves(one)] if isinstance(answers, list | tuple) else [answers]


def test_answers_are_those_of_the_back_end_of_hugging_face(folder: pathlib.Path, ours: Any) -> None:
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    how: Any = {"pretrained": str(folder), "dtype": "float32", "device": "cpu", "batch_size": 4}
    peer = simple_evaluate("hf", model_args=how, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
    want, found = samples_of(peer), samples_of(ours[64])
    for name in TASKS:
        mine, theirs = leaves(found[name]), leaves(want[name])
        if name == "own_generate":
            assert mine == theirs and sum(map(len, mine)) > 50
        else:
            x, y = (torch.tensor(rows, dtype=torch.float64) for rows in (mine, theirs))
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
    for name, metrics in peer["results"].items():
        for metric, value in metrics.items():
            if isinstance(value, float):
                assert ours[64]["results"][name][metric] == pytest.approx(value, rel=1e-6), (name, metric)


def test_no_number_depends_on_the_batch_size(ours: Any) -> None:
    assert samples_of(ours[1]) == samples_of(ours[64]) and ours[1]["results"] == ours[64]["results"]


CONFIG = gpt.Config.llama_like(
    vocab_size=256, num_layers=2, d_model=32, num_heads=4, d_ff=None, max_len=64, batch_invariant=True
)
PAIRS = [("the sea", " is blue"), ("the sea", " was"), ("a", "b"), ("x" * 70, "yes"), ("the ships of", " the line")]


def score_pairs(mesh: Any) -> torch.Tensor:
    made = decoder(CONFIG, tp="tp" if mesh.size > 1 else None)
    limits = limits_of(made, running=4, buckets=(8, 16), cache_bytes=1 << 18)
    engine = Engine(made, gpt.init(CONFIG, key(0)), mesh=mesh, limits=limits, tokenizer=ByteTokenizer())
    llm: Any = SimpleNamespace(engine=engine, text=wrap_data_tokenizer(ByteTokenizer()))
    model = make_harness_model(llm)
    found = model._loglikelihood_tokens([(None, list(x.encode()), list(y.encode())) for x, y in PAIRS])
    rolling = model.loglikelihood_rolling([SimpleNamespace(args=("the sea is blue " * 6,))])
    return torch.tensor([x for x, _ in found] + rolling, dtype=torch.float64)


@distributed(world=2)
def test_no_number_depends_on_ranks_and_threads() -> None:
    pytest.importorskip("lm_eval")
    before = torch.get_num_threads()
    made = list[torch.Tensor]()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        made += [score_pairs(make_mesh({"tp": 2})), score_pairs(make_mesh({}, alone=True))]
    torch.set_num_threads(before)
    assert all(torch.equal(made[0], x) for x in made[1:])
