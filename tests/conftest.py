"""Shared by all tests: at most two threads in all, the order of the files, the public data sets, the browser."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

THREADS = "1" if "PYTEST_XDIST_WORKER" in os.environ else "2"
os.environ["OMP_NUM_THREADS"] = THREADS  # read when a library loads; threads that wait for a core in use cost minutes

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

if TYPE_CHECKING:
    from browser import Browser

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(int(THREADS))
# The short form draws the same examples in every run, so that a change is what makes a test fail; the long ones search.
LONG_RUN = any(os.environ.get(name) for name in ("SOSELETO_LONG", "SOSELETO_LONG_CAMPAIGN"))
hypothesis.settings.register_profile("short", derandomize=True)
hypothesis.settings.load_profile("default" if LONG_RUN else "short")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts pytest in the background ignores it
# The files that take longest, by their times on two cores. Workers take whole files in this order: one of these begun
# last would keep one worker busy while the others are idle.
LONGEST = (
    "test_docs",
    "test_ranks",
    "test_fit_command",
    "test_fsdp",
    "test_data_safety",
    "test_checkpoint",
    "test_selection",
    "test_cifar10_noise",
    "test_walk",
)

# Long tests whose parts others test too; with SOSELETO_LONG=1 they all run.
LONG = (
    "test_algorithm.py::test_memory_does_not_grow",
    "test_benchmarks.py::test_coverage_compares_each_basis_with_the_truth",
    "test_benchmarks.py::test_end_to_end",
    "test_benchmarks.py::test_fine_tuning",
    "test_benchmarks.py::test_language_peers",
    "test_benchmarks.py::test_never_worse_runs_the_command_line",
    "test_benchmarks.py::test_peers",
    "test_benchmarks.py::test_scaling",
    "test_benchmarks.py::test_suspect_intervals_part_the_source",
    "test_benchmarks.py::test_tables",
    "test_checkpoint.py::test_killed_at_random_moments_it_ends_as_if_it_had_not_been",
    "test_checkpoint.py::test_the_command_line_stops_and_goes_on",
    "test_cifar10_deep.py::test_lines_take_the_same_computation",
    "test_cifar10_noise.py::test_an_interrupted_job_resumes",
    "test_cifar10_noise.py::test_every_line_has_the_same_data_and_budget[0.3]",
    "test_cifar10_noise.py::test_every_line_has_the_same_data_and_budget[0.5]",
    "test_cifar10_noise.py::test_every_line_runs[soseleto_bfloat16]",
    "test_cli.py::test_a_piped_training_prints_a_bounded_number_of_lines",
    "test_docs.py::test_typed_lines_run[soseleto check-gradients",
    "test_docs.py::test_typed_lines_run[soseleto demo",
    "test_docs.py::test_typed_lines_run[soseleto export runs/photos --onnx",
    "test_estimator.py::test_scikit_learns_own_checks[SoseletoClassifier(batch_size=1000,device='cpu',epochs=30,lr=0.3,model=",
    "test_fit.py::test_times_are_told_apart_in_training_and_prediction",
    "test_fit_command.py::test_a_rival_that_diverges_is_left_out_and_said",
    "test_fit_command.py::test_a_scikit_learn_table_with_flipped_labels_through_a_csv",
    "test_fit_command.py::test_earlier_labels_doubt_and_a_guarantee",
    "test_fit_command.py::test_folds_and_baselines_can_be_left_out",
    "test_fit_command.py::test_the_best_model_is_kept[soseleto]",
    "test_fit_command.py::test_what_has_ended_is_not_repeated",
    "test_fsdp.py::test_a_sharded_run_resumes",
    "test_hostile.py::test_hostile_folders_are_one_sentence_in_bounded_memory_and_time",
    "test_huggingface.py::test_a_resumed_training_has_the_same_weights[0.0]",
    "test_huggingface.py::test_two_ranks_share_the_weights",
    "test_large_tables.py::test_memory_does_not_grow_with_the_table",
    "test_place.py::test_the_command_continues_in_the_rescue_folder_when_its_folder_is_deleted",
    "test_pretrained_command.py::test_a_network_of_hugging_face_in_transfer_mode_is_resumed",
    "test_pseudo_labels.py::test_unlabelled_examples_help",
    "test_ranks.py::test_a_run_resumes_with_another_number_of_ranks",
    "test_ranks.py::test_no_rank_waits_for_one_that_is_lost[fails]",
    "test_ranks.py::test_no_rank_waits_for_one_that_is_lost[hangs]",
    "test_ranks.py::test_ranks_use_the_same_images_as_one_process",
    "test_scale.py::test_micro_batches_train_as_whole_batches[1-",
    "test_selection.py::test_ranks_hold_the_same_weights_as_one_process[transfer]",
    "test_selection.py::test_torchrun_runs_a_loop",
    "test_stream.py::test_probes_are_spread_over_the_batches_of_a_stream",
    "test_strong.py::test_a_network_that_was_compiled_is_one_graph_and_trains_the_same[resnet18]",
    "test_strong.py::test_probes_calibrate_suspects",
    "test_suspects.py::test_labels_before_match_real_mistakes",
    "test_svhn_mnist.py::test_every_line_runs[soseleto_alone]",
    "test_svhn_mnist.py::test_every_line_runs[soseleto_paper]",
    "test_svhn_mnist.py::test_small_experiment_beats_chance",
    "test_table_command.py::test_a_final_model_is_rescued_when_the_folder_is_deleted",
    "test_text_command.py::test_transfer_mode_trains_the_encoder_under_two_heads",
    "test_text_tables.py::test_what_a_csv_writer_wrote_is_read_or_refused",
    "test_texts.py::test_weights_of_a_fit_do_not_depend_on_the_padding",
    "test_unlabelled.py::test_a_stopped_process_ends_with_the_same_bits",
    "test_walk.py::test_fit_again_on_the_corrected_labels[generated]",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, the others keep their order; long tests only when they are asked for."""
    if os.environ.get("SOSELETO_LONG") != "1":
        for item in items:
            listed = f"{item.path.name}::{item.nodeid.partition('::')[2]}".startswith(LONG)
            if listed or item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="long: set SOSELETO_LONG=1"))
    place = {name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))


@pytest.fixture(scope="session")
def data_root() -> Path:
    root = os.environ.get("SOSELETO_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("SOSELETO_DATA does not name a folder with the public data sets")
    return Path(root)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One Chromium for all tests of a worker; those marked ``needs_browser`` are skipped without one."""
    from browser import Browser

    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], AbstractContextManager[None]]:
    """``with stop_after(7): fit(...)``: the training inside is stopped after that step, as by a crash."""
    from soseleto.training.resume import Keeper

    class Stopped(Exception):
        pass

    @contextmanager
    def stop(last: int) -> Iterator[None]:
        after = Keeper.after

        def stopping(keeper: Keeper, step: int) -> None:
            after(keeper, step)
            if step == last:
                raise Stopped

        with monkeypatch.context() as patch:
            patch.setattr(Keeper, "after", stopping)
            with pytest.raises(Stopped):
                yield

    return stop
