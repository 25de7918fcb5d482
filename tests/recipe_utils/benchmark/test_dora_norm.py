import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from recipe_utils.benchmark.dora_norm import WAYS, Contest, main


def test_the_table_has_each_size_length_and_way_to_keep_activations(capsys):
    main(["--sizes", "32x1", "--num_tokens", "8", "16", "--num_update_steps", "2", "--rank", "2"])
    rows = [line.split("|")[1:4] for line in capsys.readouterr().out.splitlines()[2:]]
    found = [tuple(cell.strip() for cell in row) for row in rows]
    assert found == [("32x1", t, a) for a in ("no", "yes") for t in ("8", "16")]


def test_all_ways_have_the_same_gradients():
    contest = Contest("32x1", 2, 16, False, torch.device("cpu"), torch.float32)
    microbatches = [contest.make_microbatch(16, seed) for seed in range(2)]
    gradients = []

    def keep(optimizer, *_):
        gradients.append([p.grad.clone() for g in optimizer.param_groups for p in g["params"]])

    contest.optimizer.param_groups[0]["lr"] = 0.0
    hook = register_optimizer_step_pre_hook(keep)
    for way in WAYS:
        contest.seconds_of(microbatches, way)
    hook.remove()
    for others in gradients[1:]:
        torch.testing.assert_close(gradients[0], others)
    assert all(gradient.abs().max() > 0 for gradient in gradients[0])
