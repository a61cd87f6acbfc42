"""What all tests share: no run ever touches the clone's data/ and out/, and a text to train on."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import settings

WORDS = ("the of and to in that it was his her with as had for not but at be on they by all which "
         "said one so when who no my if there what would up out about into them then").split()


settings.register_profile("the same each time", derandomize=True, deadline=None)
settings.load_profile("the same each time")
torch.set_num_threads(1)  # tiny models: more threads only wait for one another


# what holds only while model.py is GPT-2: found by running all in a clone whose MLP was wider, with
# ReLU squared, and whose norms were RMS norms
GPT2 = {
    "tests/kit/hf/", "tests/extras/weights/", "tests/kit/kernels/test_kernels.py",
    "test_a_gguf_file_holds_the_model", "test_bias_is_everywhere_or_nowhere",
    "test_each_text_is_what_it_is_alone", "test_erf_gelu_is_another_model",
    "test_every_change_fits_one_place_of_the_clone", "test_flops_are_those_that_a_counter_sees",
    "test_flops_of_gpt2_by_hand", "test_golden_loss_curve", "test_gpt2_has_its_parameter_count",
    "test_logits_are_those_of_transformers", "test_loss_at_step_0_is_the_predicted_one",
    "test_own_logit_is_that_of_a_model", "test_slower_layers_move_less",
    "test_stops_inside_a_draft", "test_the_edited_model_writes_by_its_own_forward",
    "test_variance_of_the_branches_is_that_of_a_model", "test_what_is_shown_is_the_same",
    "test_what_is_written_has_the_distribution_of_the_model"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.originalname in GPT2 or any(part in item.nodeid for part in GPT2 if "/" in part):
            item.add_marker("gpt2")


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("BONSAI_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("BONSAI_OUT", str(tmp_path / "out"))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # of processes that a test starts
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of processes that a test starts
    torch.manual_seed(0)


def make_text(n_words: int = 8000, seed: int = 0) -> str:
    """English-like sentences, the same on every machine and every Python."""
    rng = random.Random(seed)
    words = [WORDS[int(rng.random() ** 2 * len(WORDS))] for _ in range(n_words)]
    lines = [" ".join(words[i : i + 9]).capitalize() + "." for i in range(0, n_words, 9)]
    return "\n".join(lines)


@pytest.fixture
def text_file(tmp_path) -> Path:
    path = tmp_path / "my text.txt"
    path.write_bytes(make_text().encode())
    return path
