"""What looks like a credential is found wherever a job can carry it, and what only looks like one is left alone."""

from __future__ import annotations

import pytest

from cotenant.server.model.spec import JobSpec

TOKEN = "hf_" + "a1" * 12


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("command", {"command": ["train", TOKEN]}),
        ("command", {"command": ["train", "--token", "abcdefgh"]}),
        ("command", {"command": f"HF_TOKEN={TOKEN} train"}),
        ("name", {"name": TOKEN}),
        ("purpose", {"purpose": f"try {TOKEN}"}),
        ("project", {"project": TOKEN}),
        ("experiment", {"experiment": TOKEN}),
        ("workdir", {"workdir": f"/data/{TOKEN}"}),
        ("gpu_model", {"gpu_model": TOKEN}),
        ("prefer", {"prefer": [TOKEN]}),
        ("secrets", {"secrets": [{"env": "HF", "file": f"/run/{TOKEN}"}]}),
        ("checkpoint", {"checkpoint": {"dir": "/ck", "resume_arg": f"--resume=https://me:{'pw' * 4}@host/x"}}),
        ("env.WANDB_API_KEY", {"env": {"WANDB_API_KEY": "0123"}}),
        ("env.X", {"env": {"X": TOKEN}}),
        ("labels.who", {"labels": {"who": TOKEN}}),
        ("config.a.b", {"config": {"a": {"b": ["x", TOKEN]}}}),
        ("config.db.password", {"config": {"db": {"password": "hunter2"}}}),
        ("labels.api_key", {"labels": {"api_key": "0123"}}),
    ],
)
def test_a_credential_is_found_and_its_place_is_named(field, spec):
    found = JobSpec.model_validate({"command": ["train"], **spec}).find_secret()
    assert found is not None and found[0] == field


@pytest.mark.parametrize(
    "spec",
    [
        {"command": ["train", "--max-tokens", "4096"]},
        {"command": "train --token $TOKEN --api-key ${KEY}"},
        {"env": {"TOKENIZERS_PARALLELISM": "false", "MAX_TOKENS": "4096"}},
        {"config": {"pad_token": "[PAD]", "token": "mean", "max_tokens": 4096, "password": ""}},
        {"config": {"lr": 3e-4, "nested": [{"dropout": 0.1}], "secret": 5}},
        {"labels": {"team": "vision"}},
    ],
)
def test_what_is_no_credential_is_left_alone(spec):
    assert JobSpec.model_validate({"command": ["train"], **spec}).find_secret() is None
