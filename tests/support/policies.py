"""Files of rollouts with edge cases, and update steps on them answer by answer: plain formulas on full logits."""

import json
import math
import random
import statistics

import tiny
import torch

from recipe_utils.update_steps.samples import Facts

NUM_GROUPS, PER_STEP = 12, 4
LOSS = {"old": "file", "correction": None, "kl_weight": 0.0}
"""Defaults of the loss."""


# ---- Files ---------------------------------------------------------------------------------------


def make_groups(num_groups=NUM_GROUPS, seed=0):
    """Returns groups of answers, as rows of one answer each.

    Log-probabilities make ratios of which some are clipped. By turns a group has rewards that are all equal (0.1, whose
    mean over three is not 0.1 in float64), an answer without a trained token, answers of one token, masked tokens within
    answers, an answer in two rows, another temperature, more answers, answers that begin alike, or no trained token at all.
    """
    draw = random.Random(seed)

    def tokens(least, most):
        return [draw.randint(1, 60) for _ in range(draw.randint(least, most))]

    groups = []
    for index in range(num_groups):
        edge = index % 10
        prompt, begin = tokens(2, 16), tokens(3, 3) if edge == 8 else []
        rows = []
        for i in range(5 if edge == 7 else 3):
            answer = begin + (tokens(1, 1) if edge == 3 else tokens(1, 9))
            row = {"group": f"g{index}", "prompt_ids": prompt, "completion_ids": answer}
            row["reward"] = 0.1 if edge == 1 else draw.choice([0.0, 0.3, 1.0]) + (i == 0) / 8
            if edge in (2, 4, 9):
                is_trained = {2: 0.0 if i == 1 else 1.0, 4: 0.6, 9: 0.0}[edge]
                row["mask"] = [int(draw.random() < is_trained) for _ in answer]
            if edge == 6:
                row["temperature"] = 0.7
            if edge == 5:
                row["rollout"] = f"r{i}"
            rows.append(row)
            if edge == 5 and i == 1:  # its history was summarized
                rows.append({**row, "prompt_ids": tokens(2, 9), "completion_ids": tokens(2, 5)})
        for row in rows:
            number = len(row["completion_ids"])
            mask = row.get("mask", [1] * number)
            row["logprobs"] = [trained * (-4.2 + draw.gauss(0, 0.3)) for trained in mask]
            row["ref_logprobs"] = [trained * (-4.2 + draw.gauss(0, 0.3)) for trained in mask]
            row["advantage"] = [trained * draw.gauss(0, 1) for trained in mask]
        groups.append(rows)
    return groups


def of_whole_answers(groups):
    """Returns groups without parts of answers but the first."""
    return [[{k: v for k, v in parts[0].items() if k != "rollout"} for parts in by_answer(rows)] for rows in groups]


def write(path, groups, leave_out=("ref_logprobs", "advantage")):
    """Writes a file of one answer a line, without some keys."""
    rows = [{key: value for key, value in row.items() if key not in leave_out} for group in groups for row in group]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def graded_groups(tokenizer, num_groups):
    """Returns groups with advantages by token, and without log-probabilities, as a dataset of one's own does."""
    sequences = [
        [
            {
                "tokens": row["prompt_ids"] + row["completion_ids"],
                "labels": [tiny.IGNORE] * len(row["prompt_ids"]) + row["completion_ids"],
                "advantages": [0.0] * len(row["prompt_ids"]) + row["advantage"],
            }
            for row in rows
        ]
        for rows in make_groups(num_groups)
    ]
    return tiny.WithFacts([{"sequences": of_group} for of_group in sequences], Facts(has_sequences=True))


# ---- Formulas ------------------------------------------------------------------------------------


def by_answer(rows):
    """Returns the rows of each answer of a group: one, or several parts of one run."""
    answers = {}
    for index, row in enumerate(rows):
        answers.setdefault(row.get("rollout", index), []).append(row)
    return list(answers.values())


def mask_of(row):
    return row.get("mask", [1] * len(row["completion_ids"]))


def advantages_of(rewards, how):
    """Returns the advantage of each answer of a group."""
    mean = statistics.fmean(rewards)
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    if how == "leave_one_out":
        return [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    return [(r - mean) / (statistics.stdev(rewards) + 1e-6 if how == "mean_std" else 1) for r in rewards]


def log_probs_of(model, row):
    """Returns log-probabilities of an answer's trained tokens, and the entropies of their distributions."""
    logits = model(torch.tensor([row["prompt_ids"] + row["completion_ids"]]))[0]
    picked, entropies, before = [], [], len(row["prompt_ids"])
    for index, (token, is_trained) in enumerate(zip(row["completion_ids"], mask_of(row), strict=True)):
        if is_trained:  # the position before a token predicts it
            probs = (logits[before + index - 1] / row.get("temperature", 1.0)).softmax(-1)
            picked.append(probs[token].log())
            entropies.append(-(probs * probs.log()).sum().detach())
    return torch.stack(picked), torch.stack(entropies)


def column_of(row, key):
    """Returns the numbers of an answer's trained tokens."""
    trained = [x for x, is_trained in zip(row[key], mask_of(row), strict=True) if is_trained]
    return torch.tensor(trained, dtype=torch.float64)


def terms_of(row, advantage, log_probs, old, sampled, reference, loss):
    """Returns the term of each trained token of a row, and what is logged of it."""
    low, high = loss["clip_low"], loss["clip_high"]
    ratio = (log_probs - old).exp()
    if loss["kind"] == "sequence":
        ratio = ratio.log().mean().exp().expand(len(ratio))
        # Where tokens differ otherwise, each has the gradient of its own log-probability.
        if loss["correction"] or len(set(advantage.tolist())) > 1:
            ratio = ratio.detach() * (log_probs - log_probs.detach()).exp()
    if loss["kind"] == "cispo":
        term = -ratio.detach().clamp(max=1 + high) * advantage * log_probs
    elif loss["kind"] == "reinforce":
        term = -advantage * log_probs
    else:
        term = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        if loss.get("clip_dual"):  # as verl writes it
            term = torch.where(advantage < 0, term.minimum(-loss["clip_dual"] * advantage), term)
    found = {"ratio": ratio}
    if loss.get("clip_dual"):
        found["clipped_dual"] = (ratio > loss["clip_dual"]) & (advantage < 0)
    if low is not None:
        found["clipped_low"] = (ratio < 1 - low) & (advantage < 0)
    if high is not None:
        found["clipped_high"] = (ratio > 1 + high) & (advantage > 0)
    if sampled is not None:
        found["kl_sampler"] = sampled - log_probs
        weight = (old - sampled).exp()
        least, most = loss.get("correction_low", 0.0), loss.get("correction_high", math.inf)
        is_inside = (weight <= most) if loss["correction"] == "truncate" else (least <= weight) & (weight <= most)
        if loss["correction"] == "truncate":
            term = term * weight.clamp(max=most)
        elif loss["correction"] == "mask":
            term = term * torch.where(is_inside, weight, 0.0)
        if loss["correction"]:
            found["corrected"] = ~is_inside
    if loss["kl_weight"]:
        k1 = log_probs - reference
        kl = {"k1": k1, "k2": k1**2 / 2, "k3": (-k1).exp() - 1 + k1}[loss["kl"]]
        found["kl_reference"] = kl
        term = term + loss["kl_weight"] * kl
    return term, {name: values.detach().double() for name, values in found.items()}


def policy_gradient(model, start, reference, groups, loss, how="mean_std"):
    """Returns the loss and what is logged beside it.

    ``start`` is the model at the start of the round, None in its first update step; ``reference`` is a model, or None:
    log-probabilities of the file. ``loss`` has keys of the config, ``how`` is the advantage.
    """
    loss = {**LOSS, **loss}
    groups = [by_answer(rows) for rows in groups]
    # Trained tokens of each answer, of all its parts.
    sizes = [[sum(sum(mask_of(row)) for row in parts) for parts in answers] for answers in groups]
    num_tokens, num_answers = sum(map(sum, sizes)), sum(size > 0 for of_group in sizes for size in of_group)
    num_groups = sum(sum(of_group) > 0 for of_group in sizes)
    total, measured, rewards_of_answers, num_equal = 0.0, [], [], 0
    num_masked = sum(size == 0 for of_group in sizes for size in of_group)
    for answers, of_group in zip(groups, sizes, strict=True):
        rewards = [parts[0]["reward"] for parts in answers]
        is_equal = len(set(rewards)) == 1
        num_equal += is_equal and sum(of_group) > 0
        for parts, size, reward, of_answer in zip(answers, of_group, rewards, advantages_of(rewards, how), strict=True):
            rewards_of_answers.append(reward)
            if not size:
                continue
            weight = {
                "tokens": 1 / num_tokens,
                "answers": 1 / (num_answers * size),
                "constant": 1 / (num_answers * loss.get("tokens_per_answer", 1)),
                "prompts": 1 / (num_groups * sum(of_group)),
            }[loss["normaliser"]]
            if is_equal and not loss["kl_weight"] and how not in ("given", "teacher"):
                continue  # zero, and not computed
            for row in (row for row in parts if sum(mask_of(row))):
                log_probs, entropies = log_probs_of(model, row)
                sampled = column_of(row, "logprobs") if "logprobs" in row else None
                with torch.no_grad():
                    given = log_probs.detach() if start is None else log_probs_of(start, row)[0]
                    of_reference = (
                        column_of(row, "ref_logprobs") if reference is None else log_probs_of(reference, row)[0]
                    )
                old = given if loss["old"] == "start" or sampled is None else sampled
                advantage = torch.full((len(old),), of_answer, dtype=torch.float64)
                if how == "given":
                    advantage = column_of(row, "advantage")
                elif how == "teacher":
                    advantage = of_reference - sampled
                term, found = terms_of(row, advantage, log_probs, old, sampled, of_reference, loss)
                total = total + weight * term.sum()
                measured.append({**found, "entropy": entropies})
    means = {name: torch.cat([found[name] for found in measured]) for name in measured[0]}
    return {
        "loss": total,
        **{name: values.mean() for name, values in means.items()},
        "ratio_max": means["ratio"].max(),
        "mean_reward": statistics.fmean(rewards_of_answers),
        "equal_groups": num_equal / num_groups,
        "num_groups": num_groups,
        "num_answers": num_answers,
        "num_masked": num_masked,
        "num_tokens": num_tokens,
    }
