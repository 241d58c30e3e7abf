"""Covers the sinks of Weights & Biases and MLflow, by the real packages without a network, where they are installed."""

import importlib.util
import json
import math
import pathlib
import struct
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from shardfn.metrics import Logger, MLflow, WandB

# Not imported when tests are collected: each takes seconds, and changes how warnings are shown.
needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
needs_mlflow = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
# Warnings of the packages about themselves.
theirs = pytest.mark.filterwarnings("ignore:.*")


@pytest.mark.parametrize(("sink", "name"), [(WandB(), "wandb"), (MLflow(), "mlflow")])
def test_without_the_package_the_remedy_is_in_the_error(
    sink: Any, name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ModuleNotFoundError, match=rf"needs the package {name}(.|\n)*pip install {name}, or leave the sink out"
    ):
        Logger(tmp_path, sinks=[sink])


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a file of wandb: a log of LevelDB behind a header of 7 bytes, in blocks of 32 KiB."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts, at = parts + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def _logged(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The rows in the files of offline runs of wandb, in the order of the runs."""
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    out = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        for data in _records(path.read_bytes()):
            record: Any = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                found = {x.key or x.nested_key[0]: json.loads(x.value_json) for x in record.history.item}
                out.append({name: x for name, x in found.items() if not name.startswith("_")})
    return out


@theirs
@needs_wandb
def test_wandb_has_the_rows_and_a_resumed_run_its_id(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    for key in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{key}_DIR", str(tmp_path / key))
    sink = WandB(project="p", mode="offline", config={"learning_rate": 0.5})
    with Logger(tmp_path, sinks=[sink]) as logger:
        logger.write(1, {"loss": 0.5})
        logger.write(2, {"loss": 0.25, "validation_loss": 0.75})
    first = (tmp_path / "wandb_run").read_text()
    assert _logged(tmp_path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25, "validation_loss": 0.75}]
    with Logger(tmp_path, sinks=[WandB(project="p", mode="offline")], start=1) as logger:
        logger.write(2, {"loss": 0.125})
    assert (tmp_path / "wandb_run").read_text() == first and _logged(tmp_path)[2:] == [{"step": 2, "loss": 0.125}]
    with Logger(tmp_path, sinks=[WandB(project="p", mode="offline")]):
        pass
    assert (tmp_path / "wandb_run").read_text() != first


@theirs
@needs_mlflow
@pytest.mark.nightly
def test_mlflow_has_the_rows_and_a_resumed_run_goes_on(tmp_path: pathlib.Path) -> None:
    import mlflow  # pyright: ignore[reportMissingImports]

    uri = f"sqlite:///{tmp_path}/runs.db"
    sink = MLflow("gpt", tracking_uri=uri, run_name="small", params={"learning_rate": 0.5}, tags={"by": "a test"})
    with Logger(tmp_path, sinks=[sink]) as logger:
        logger.write(1, {"loss": 0.5, "grad_norm/['w'][0]": 2.0})
        logger.write(2, {"loss": math.nan})
    with Logger(tmp_path, sinks=[MLflow("gpt", tracking_uri=uri)], start=2) as logger:
        logger.write(3, {"loss": 0.125})
    client: Any = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("gpt").experiment_id])
    assert run.info.run_id == (tmp_path / "mlflow_run").read_text().strip() and run.info.run_name == "small"
    assert run.data.params == {"learning_rate": "0.5"} and run.data.tags["by"] == "a test"
    assert run.info.status == "FINISHED"
    found = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "loss")}
    assert found.keys() == {1, 2, 3} and found[1] == 0.5 and math.isnan(found[2]) and found[3] == 0.125
    assert [m.value for m in client.get_metric_history(run.info.run_id, "grad_norm/__w___0_")] == [2.0]


@theirs
@needs_mlflow
def test_a_service_that_goes_away_stops_nothing(tmp_path: pathlib.Path) -> None:
    uri = f"sqlite:///{tmp_path}/runs.db"
    with Logger(tmp_path, sinks=[MLflow(tracking_uri=uri)]) as logger:
        logger.write(1, {"loss": 0.5})
        (tmp_path / "runs.db").write_bytes(b"")
        with pytest.warns(UserWarning, match="MLflow could not write step 2"):
            logger.write(2, {"loss": 0.5})
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]
