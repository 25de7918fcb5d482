"""The sampler draws from the model's own distribution, alike on any ranks, and rewards are named where they fail."""

import json
import re

import numpy as np
import pytest
import tiny
import torch
from distributed_runs import run_distributed
from recipe_runs import slow

from recipe_utils.parallel.fsdp import shard_model
from recipe_utils.parallel.settings import RankSettings
from recipe_utils.policy.sampler import ModelSampler
from recipe_utils.settings.problems import ConfigError
from recipe_utils.update_steps.permutation import seed_of

PROMPTS = ["Why?", "What does it do, and for how long?", "x", "How many of them are there?", "Where"]
ROUND, NUM, ENDS = 3, 5, range(1, 9)
TOKENIZER = tiny.tiny_tokenizer()
TOKENIZER.stop_tokens = tuple(ENDS)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": prompt, "target": len(prompt)} for prompt in PROMPTS]
    rows[1]["prompt"] = [{"role": "user", "content": PROMPTS[1]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sampler_of(prompts, reward="of_length", **changes):
    arguments = {"group_size": 3, "max_new_tokens": 12, "temperature": 0.7, "seed": 5, "batch_size": 7, **changes}
    return ModelSampler(prompts, f"rewards.{reward}", **arguments)


def sampled(prompts, sizes=tiny.MODEL, dims=(), **changes):
    """Returns the groups of a round on the ranks of the layout: two ranks have 8 and 7 answers, in batches of 7."""
    ranks = RankSettings(device="cpu", **dict(dims)).join()
    with tiny.float64_throughout():
        model = tiny.tiny_model(sizes, seed=3).double()
        if ranks.dp_degree > 1:
            options = {"custom_sharded_layers": None, "cpu_offload": False, "reshard_after_forward": True}
            shard_model(model, ranks.mesh, **options)
        groups = sampler_of(prompts, **changes).sample(model, TOKENIZER, ranks, ROUND, NUM)
    assert not model.layers[0].attn.cache_enabled
    return groups


def one_by_one(sizes):
    """Returns answers and log-probabilities of a round, by forwards of all tokens so far, by prompt."""
    model, found = tiny.tiny_model(sizes, seed=3).double().eval(), {}
    place_of = [divmod(place, len(PROMPTS)) for place in range(ROUND * NUM, (ROUND + 1) * NUM)]
    for place, (epoch, of_pass) in enumerate(place_of):
        order = torch.randperm(len(PROMPTS), generator=torch.Generator().manual_seed(5 + epoch))
        prompt = [2 + ord(letter) % (tiny.VOCAB_SIZE - 2) for letter in PROMPTS[order[of_pass]]]
        for k in range(3):
            generator = torch.Generator().manual_seed(seed_of(5, ROUND, place, k))
            uniform, tokens, log_probs = torch.rand(12, generator=generator, dtype=torch.float64), [], []
            while len(tokens) < 12 and not {*tokens[-1:]} & {*ENDS}:
                with torch.no_grad(), tiny.float64_throughout():
                    logits = model(torch.tensor([prompt + tokens]))[0, -1].numpy() / 0.7
                probabilities = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
                tokens.append(int((probabilities.cumsum() <= uniform[len(tokens)].item()).sum()))
                log_probs.append(np.log(probabilities[tokens[-1]]))
            found.setdefault(place, (prompt, [], []))[1].append(tokens)
            found[place][2].append(log_probs)
    return [found[place] for place in range(NUM)]


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [(1, "MODEL"), (2, "UNTIED_MODEL"), slow(1, "GEMMA2_MODEL"), slow(4, "MODEL"), slow(2, "GEMMA2_MODEL")],
)
def test_answers_and_log_probabilities_are_those_of_one_forward_for_each_token(world_size, sizes, prompts):
    expected = one_by_one(sizes := getattr(tiny, sizes))
    for groups in run_distributed(sampled, world_size, prompts, sizes):
        for group, (prompt, answers, log_probs) in zip(groups, expected, strict=True):
            assert (group["prompt_ids"], group["completion_ids"]) == (prompt, answers)
            np.testing.assert_allclose(np.concatenate(group["logprobs"]), np.concatenate(log_probs), atol=1e-9, rtol=0)
            texts = [" ".join(str(token) for token in answer if token not in ENDS) for answer in answers]
            assert group["completions"] == texts
            assert group["rewards"] == [-abs(len(text.split()) - len(prompt)) for text in texts]
            assert group["temperature"] == 0.7
    lengths = {len(answer) for _, answers, _ in expected for answer in answers}
    assert len(lengths) > 1, "no answer ends before another"


# ---- Rewards as TRL's ------------------------------------------------------------------------------


def rewarded(prompts, reward):
    """Returns the groups of a round with two rewards, or with another number of answers scored."""
    ranks = RankSettings(device="cpu").join()
    rounds = []
    for each in ("of_length", reward):
        with tiny.float64_throughout():
            rounds.append(
                sampler_of(prompts, each).sample(
                    tiny.tiny_model().double(), TOKENIZER, ranks, ROUND, NUM, global_step=11
                )
            )
    return rounds


@pytest.mark.parametrize("reward", ["of_ids", "only_texts"])
def test_rewards_of_trl_get_messages_ids_and_state_and_may_leave_answers_out(reward, prompts):
    (rounds,) = run_distributed(rewarded, 1, prompts, reward)
    num_left_out = 0
    for whole, group in zip(*rounds, strict=True):
        is_chat = len(whole["prompt_ids"]) == len(PROMPTS[1])
        lengths = [*map(len, whole["completion_ids"])]
        if reward == "only_texts":
            assert group == {**whole, "rewards": [0.0 if is_chat else 1.0] * 3}
            continue
        kept = [k for k in range(3) if not (is_chat and lengths[k] % 2)]
        num_left_out += 3 - len(kept)
        rewards = [lengths[k] for k in kept]
        if len(kept) < 2:
            kept, rewards = range(3), [sum(rewards)] * 3
        lists = {key: [whole[key][k] for k in kept] for key in ("completion_ids", "logprobs", "completions")}
        assert group == {**whole, **lists, "rewards": rewards}
    assert reward == "only_texts" or num_left_out


# ---- Draws ---------------------------------------------------------------------------------------


def test_tokens_are_drawn_with_the_probabilities_of_the_tempered_logits(prompts):
    """Pearson's statistic of first tokens, which has the expectation 66 and the standard deviation 11.5."""
    num_draws, statistics = 4000, {}
    changes = {"group_size": num_draws, "max_new_tokens": 1, "batch_size": num_draws}
    (groups,) = run_distributed(sampled_once, 1, prompts, changes)
    tokens = [token for (token,) in groups[0]["completion_ids"]]
    with torch.no_grad(), tiny.float64_throughout():
        logits = tiny.tiny_model(seed=3).double().eval()(torch.tensor([groups[0]["prompt_ids"]]))[0, -1]
    for temperature in (0.7, 1.0):
        expected = num_draws * torch.softmax(logits / temperature, dim=0)
        statistics[temperature] = (
            ((torch.bincount(torch.tensor(tokens), minlength=67) - expected) ** 2) / expected
        ).sum()
    assert statistics[0.7] < 66 + 4 * 11.5 < statistics[1.0]


def sampled_once(prompts, changes):
    ranks = RankSettings(device="cpu").join()
    with tiny.float64_throughout():
        return sampler_of(prompts, **changes).sample(tiny.tiny_model(seed=3).double(), TOKENIZER, ranks, ROUND, 1)


# ---- Errors --------------------------------------------------------------------------------------


def error_of(prompts, changes, max_seq_len=64):
    """Returns the error of a round of one prompt."""
    ranks = RankSettings(device="cpu").join()
    with pytest.raises(ConfigError) as error:
        sampler_of(prompts, **changes).sample(tiny.tiny_model(), tiny.tiny_tokenizer(max_seq_len), ranks, 0, NUM)
    return str(error.value)


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        ("raising", r"sampler.reward=rewards.raising: KeyError: 'answer' \(line \d+ of .*rewards.py\)"),
        ("too_few", "sampler.reward=rewards.too_few: it returned 1 numbers for 15 completions"),
        ("not_finite", "sampler.reward=rewards.not_finite: it returned nan for the completion '"),
    ],
)
def test_errors_of_a_reward_name_it_on_all_ranks(reward, problem, prompts):
    for error in run_distributed(error_of, 2, prompts, {"reward": reward}):
        assert re.search(problem, error)


def test_a_prompt_without_room_for_an_answer_is_named(prompts):
    (error,) = run_distributed(error_of, 1, prompts, {}, len(PROMPTS[1]))
    assert "sampler.prompts: a prompt leaves no room for an answer within 34 tokens: " in error


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"group_size": 0}, "group_size=0: set it to 1 or more"),
        ({"temperature": 0.0}, "temperature=0.0: set it to a number above 0"),
        ({"reward": "nothing"}, "nothing"),
        ({"reward": "of_answer"}, "reward=rewards.of_answer: it needs answer; write it as a key of the prompts' rows"),
        ({"reward": "of_places"}, "reward=rewards.of_places: it needs completions; write"),
        ({"reward": "NOT_CALLABLE"}, "reward=rewards.NOT_CALLABLE: it is a int, not a function"),
    ],
)
def test_wrong_arguments_are_refused_before_weights_load(changes, problem, prompts):
    with pytest.raises(ValueError, match=problem):
        sampler_of(prompts, **changes)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"target": 3}, "it has no prompt"),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "path": "cat.png"}]}]}, "it has an image"),
        ({"prompt": "What?", "images": ["cat.png"]}, "it has an image, and a sampler decodes texts alone"),
    ],
)
def test_a_row_that_cannot_be_sampled_is_named(row, problem, prompts):
    with open(prompts, "a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=rf"line 6 of .*prompts.jsonl: {problem}"):
        sampler_of(prompts)
