"""Metrics reach the loggers and a file, one object per update step, also of resumed trainings."""

import json
import math

import pytest

from recipe_utils.training.log import Log, MetricsFile, read_metrics


def lines_of(path):
    return [{k: v for k, v in line.items() if k != "time"} for line in read_metrics(path)]


def test_metrics_of_an_update_step_are_one_line(tmp_path):
    path = tmp_path / "logs" / "metrics.jsonl"
    file = MetricsFile(path, 0, "run")
    file.log_dict({"loss": 3.5, "lr": 0.1}, step=1)
    file.log_dict({"loss": 3.25}, step=2)
    assert len(path.read_text().splitlines()) == 2  # whole at any moment
    file.log_dict({"val_loss": 4.0}, step=2)
    file.log_dict({"loss": math.nan, "grad_norm": math.inf}, step=3)
    file.close()
    assert lines_of(path) == [
        {"step": 1, "loss": 3.5, "lr": 0.1},
        {"step": 2, "loss": 3.25, "val_loss": 4.0},
        {"step": 3, "loss": None, "grad_norm": None},
    ]


@pytest.mark.parametrize("cut", ["", '{"step": 5, "lo', '{"step": 5}\n[1, 2]\nnot JSON\n'])
def test_a_resumed_run_appends_and_drops_what_was_after_its_checkpoint(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": float(step)}) for step in (1, 2, 3, 4)]
    path.write_text("\n".join(lines) + "\n" + cut)
    resumed = MetricsFile(path, 2, "run")
    assert lines_of(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]
    resumed.log_dict({"val_loss": 9.0}, 2)
    resumed.log_dict({"loss": 30.0}, 3)
    resumed.close()
    assert lines_of(path) == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 2.0, "val_loss": 9.0},
        {"step": 3, "loss": 30.0},
    ]


def test_a_new_run_keeps_the_file_of_an_earlier_one_under_another_name(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for run_id, loss in (("a", 1.0), ("b", 2.0)):
        file = MetricsFile(path, 0, run_id)
        file.log_dict({"loss": loss}, 1)
        file.close()
    assert lines_of(path) == [{"step": 1, "loss": 2.0}]
    assert lines_of(tmp_path / "metrics_before_b.jsonl") == [{"step": 1, "loss": 1.0}]


def test_a_file_that_cannot_be_written_is_reported_once_and_the_others_are_written(tmp_path, caplog):
    class Kept:
        lines = []  # noqa: RUF012

        def log_dict(self, metrics, step):
            self.lines.append((step, dict(metrics)))

        def close(self):
            pass

    (tmp_path / "logs").write_text("no folder")
    log = Log(tmp_path / "logs", is_shown=True)
    log.add("metric_logger", Kept())
    log.open_metrics(0, "run")
    for step in (1, 2):
        log.write(step, {"loss": 1.0}, also={"epoch": 0})
        log.write_answers(step, ["Why?"], ["Because."])
    log.close()
    assert Kept.lines == [(1, {"loss": 1.0}), (2, {"loss": 1.0})]
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.split(":")[0] for text in texts] == ["metrics.jsonl", "samples.jsonl"]


def test_answers_are_kept_as_json(tmp_path):
    log = Log(tmp_path, is_shown=True)
    log.write_answers(7, ["Why?", "ä"], ["So.\nAnd so.", "ü"])
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert lines == [{"step": 7, "prompt": "Why?", "answer": "So.\nAnd so."}, {"step": 7, "prompt": "ä", "answer": "ü"}]


def test_ranks_that_are_not_shown_write_nothing(tmp_path):
    log = Log(tmp_path / "logs", is_shown=False)
    log.open_metrics(0, "run")
    log.write(1, {"loss": 1.0}, {})
    log.write_answers(1, ["Why?"], ["So."])
    log.close()
    assert not (tmp_path / "logs").exists()
