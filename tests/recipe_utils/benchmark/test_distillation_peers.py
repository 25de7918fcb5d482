import pytest
import tiny
import torch
import torch.nn.functional as F
import yaml
from omegaconf import OmegaConf
from recipe_runs import tiny_kd_config
from torch import nn

from recipe_utils.benchmark.crafted_distillation import CraftedDistillation
from recipe_utils.benchmark.distillation_peers import StockLossLogger
from recipe_utils.benchmark.interleave import LossLogger
from recipe_utils.benchmark.lineup import LineupSettings
from recipe_utils.settings.problems import ConfigError
from recipe_utils.settings.read import read_settings

OURS = {"_component_": "recipe_utils.loss.LinearDistillationLoss"}


@pytest.fixture
def read(tmp_path):
    """Reads a lineup over the tiny config with a teacher, with changes."""

    def read(base=None, **changes):
        base = tiny_kd_config(tmp_path, **(base or {}))
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
        config = {
            "output_dir": f"{tmp_path}/out",
            "update_step_recipe": "knowledge_distillation_update_step",
            "update_step_config": f"{tmp_path}/base.yaml",
            "peers": {"stock": {"kind": "stock"}, "ours": {"kind": "update_step"}},
            "num_update_steps": 2,
            **changes,
        }
        return read_settings(OmegaConf.create(config), LineupSettings)

    return read


# ---- The lineup -------------------------------------------------------------------------------------


def test_stock_gets_the_losses_that_it_knows(read):
    stock, ours = read(base={"kd_ratio": 0.3, "kd_loss": OURS}).lineup.peers
    assert stock.config["loss"]["_component_"].endswith(".CEWithChunkedOutputLoss")
    assert stock.config["kd_loss"]["_component_"].endswith(".ForwardKLWithChunkedOutputLoss")
    assert ours.config["kd_loss"] == OURS
    for peer in (stock, ours):
        assert peer.config["metric_logger"]["kd_ratio"] == peer.config["kd_ratio"] == 0.3


@pytest.mark.parametrize(
    ("kd_loss", "problem"),
    [
        ({**OURS, "divergence": "js"}, "overrides.kd_loss=LinearDistillationLoss: "),
        ({"_component_": "torchtune.modules.loss.ReverseKLLoss"}, "overrides.kd_loss=ReverseKLL"),
        ({**OURS, "temperature": 2.0}, "overrides.kd_loss.temperature: "),
    ],
)
def test_a_divergence_whose_losses_do_not_compare_is_refused(read, kd_loss, problem):
    with pytest.raises(ConfigError) as caught:
        read(base={"kd_loss": kd_loss})
    (found,) = map(str, caught.value.problems)
    assert found.startswith(problem)


def test_stock_is_left_out_on_several_processes_and_keeps_adapters(read):
    changes = {"nproc_per_node": 2, "baseline": "ours"}
    assert read(**changes).lineup.skipped == {"stock": "skipped: runs as one process only"}
    adapted = read(base={"model": tiny.adapted(tiny.MODEL)}).lineup
    assert [peer.draws_adapters for peer in adapted.peers] == [True, True]


def test_a_trainer_without_cross_entropy_takes_part_where_there_is_none(read):
    peers = {"ours": {"kind": "update_step"}, "trl": {"kind": "trl"}}
    reason = "skipped: computes no cross-entropy; set kd_ratio=1"
    assert read(peers=peers, overrides={"kd_ratio": 0.9}).lineup.skipped == {"trl": reason}
    reason = read(peers=peers, overrides={"kd_ratio": 1.0}).lineup.skipped.get("trl", "")
    assert "cross-entropy" not in reason
    adapted = read(base={"model": tiny.adapted(tiny.MODEL)}, peers=peers)
    assert adapted.lineup.skipped["trl"] == "skipped: trains no adapters with a teacher"


# ---- Losses -----------------------------------------------------------------------------------------


class Taken:
    def __init__(self):
        self.losses = []

    def add_loss(self, loss):
        self.losses.append(loss)


def test_the_entropy_counts_as_much_as_the_divergence(monkeypatch):
    taken = Taken()
    monkeypatch.setattr(LossLogger, "gate", taken)
    logger = StockLossLogger(kd_ratio=0.25)
    logger.log_dict({"loss": 2.0, "teacher_entropy": 4.0}, 1)
    logger.log_dict({"loss": 2.0}, 2)
    assert taken.losses == [3, 2]


class Table(nn.Module):
    """Logits of the next token by the token, whatever came before."""

    def __init__(self, num_token_ids):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(num_token_ids, num_token_ids, generator=generator)
        self.table = nn.Parameter(table.double())

    def forward(self, tokens):
        return self.table[tokens]


def test_the_loss_of_crafted_update_steps_weighs_each_target_alike(weights_folder):
    config = OmegaConf.create(tiny_kd_config(weights_folder, kd_ratio=0.25))
    dataset = CraftedDistillation(None, num_token_ids=tiny.VOCAB_SIZE, max_seq_len=32)
    student, teacher = Table(tiny.VOCAB_SIZE), tiny.tiny_model(tiny.WIDE_MODEL, seed=1).double()
    for samples in dataset.cases().values():
        losses = []
        for sample in samples:
            tokens, labels = torch.tensor([sample["tokens"]]), torch.tensor(sample["labels"])[1:]
            is_target = labels != tiny.IGNORE
            log_q = student(tokens)[0, :-1][is_target].log_softmax(1)
            log_p = teacher(tokens)[0, :-1][is_target].log_softmax(1)
            ce = F.nll_loss(log_q, labels[is_target], reduction="none")
            losses.append(0.75 * ce + 0.25 * (log_p.exp() * (log_p - log_q)).sum(1))
        expected = torch.cat(losses).mean()
        torch.testing.assert_close(
            dataset.loss(student, samples, config), expected, rtol=1e-6, atol=0
        )
