"""`kvbench load-vs-recompute` as a user meets it: verdicts, sweeps, sources of rates, refusals, interruption."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.main import main
from kvbench.core.provenance import Origin
from kvbench.load_vs_recompute.ask import Question, ask
from kvbench.load_vs_recompute.series import Series
from kvbench.results.codec import read_document, write_document
from kvbench.results.document import Document, new_document, numbers_without_origin
from kvbench.results.host import Host
from kvbench.results.host_paths import HostPaths, Limit, MeasuredPath

MADE_UP = Origin(provenance="synthetic", source="made up for a test")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["load-vs-recompute", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def result_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    found, out, err = run(capsys, *arguments, "--json")
    assert found == code, err
    document: dict[str, Any] = json.loads(out)
    return document


class TestVerdicts:
    def test_dram_is_loaded_and_a_slow_shared_drive_is_split_or_recomputed(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        points = result_of(
            capsys, "qwen3-235b-a22b", "--tp=8", "--tokens=32768", "--tier=dram=50GB/s", "--tier=file=1GB/s"
        )["result"]["points"]
        assert [point["verdict"] for point in points] == ["load", "recompute"]
        assert points[1]["limited_by"] == "tier shared by 8"
        assert points[1]["rank_bytes_per_s"] == 1e9 / 8

    def test_parts_of_the_load_time_add_up(self, capsys: pytest.CaptureFixture[str]) -> None:
        for suffix in ("0", "512"):
            point = result_of(
                capsys,
                "llama-3.1-8b",
                "--tokens=8192",
                f"--suffix={suffix}",
                "--loads-per-s=20",
                "--tier=dram=40GB/s,1ms",
            )["result"]["points"][0]
            parts = (
                point["t_load_queue_s"] + point["t_load_fixed_s"] + point["t_load_wire_s"] - point["t_load_overlap_s"]
            )
            assert point["t_load_s"] == pytest.approx(parts)
            assert (point["t_load_overlap_s"] > 0) == (suffix == "512")

    def test_at_its_break_even_bandwidth_both_sides_take_equally_long(self, capsys: pytest.CaptureFixture[str]) -> None:
        for model, tp in (("qwen3-32b", "2"), ("gpt-oss-120b", "1"), ("kimi-linear-48b-a3b", "1")):
            first = result_of(capsys, model, f"--tp={tp}", "--tokens=8192", "--tier=dram=50GB/s")["result"]["points"][0]
            rate = first["break_even_bytes_per_s"]
            again = result_of(capsys, model, f"--tp={tp}", "--tokens=8192", f"--tier=dram={rate!r}B/s")
            assert again["result"]["points"][0]["ratio"] == pytest.approx(1, rel=1e-6)

    @pytest.mark.parametrize(
        ("model", "tp", "tokens", "kv_dtype", "expected"),
        [
            ("llama-3.1-8b", 1, 1024, "bf16", 9.11),
            ("llama-3.1-70b", 8, 32768, "bf16", 1.80),
            ("qwen3-32b", 2, 131072, "bf16", 1.30),
            ("qwen3-235b-a22b", 8, 32768, "bf16", 4.12),
            ("deepseek-v3", 8, 8192, "bf16", 6.05),
            ("deepseek-v3.2", 8, 32768, "fp8_ds_mla", 3.09),
            ("kimi-k2", 8, 131072, "bf16", 2.47),
            ("glm-5", 8, 8192, "fp8_ds_mla", 4.77),
            ("mixtral-8x7b", 2, 1024, "bf16", 5.08),
            ("minimax-m2", 8, 32768, "bf16", 5.64),
            ("gemma-3-27b", 1, 8192, "bf16", 2.54),
        ],
    )
    def test_published_break_even_bandwidths_at_peak_with_even_division(
        self, model: str, tp: int, tokens: int, kv_dtype: str, expected: float, capsys: pytest.CaptureFixture[str]
    ) -> None:
        point = result_of(
            capsys, model, f"--tp={tp}", f"--tokens={tokens}", f"--kv-dtype={kv_dtype}", "--efficiency=1.0",
            "--peak-flops=989e12", "--rank-work=even", "--page-tokens=16", "--tier=dram=50GB/s",
        )["result"]["points"][0]  # fmt: skip
        assert point["break_even_bytes_per_s"] / 1e9 == pytest.approx(expected, abs=0.006)

    def test_a_saturated_path_gets_no_verdict_and_says_so(self, capsys: pytest.CaptureFixture[str]) -> None:
        document = result_of(capsys, "llama-3.1-8b", "--tokens=32768", "--loads-per-s=50", "--tier=dram=50GB/s")
        point = document["result"]["points"][0]
        assert point["verdict"] == "no_verdict"
        assert point["utilisation_ratio"] >= 0.8
        assert point["t_load_queue_s"] is None
        assert [warning["code"] for warning in document["warnings"]] == ["saturated"]

    def test_a_verdict_at_peak_that_any_efficiency_keeps_is_sure(self, capsys: pytest.CaptureFixture[str]) -> None:
        points = result_of(
            capsys, "qwen3-235b-a22b", "--tp=8", "--tokens=32768", "--tier=dram=50GB/s", "--tier=mid=12GB/s"
        )["result"]["points"]
        assert points[0]["sure"]
        assert points[0]["ratio_low"] < points[0]["ratio"] < points[0]["ratio_high"]
        assert not points[1]["sure"]

    def test_the_flip_it_names_flips_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ("qwen3-235b-a22b", "--tp=8", "--tokens=32768")
        point = result_of(capsys, *arguments, "--tier=dram=50GB/s")["result"]["points"][0]
        assert point["flip_input"] == "bandwidth"
        for share, verdict in ((1.01, point["verdict"]), (0.99, point["flip_verdict"])):
            tier = f"--tier=dram={point['flip_value'] * share!r}B/s"
            assert result_of(capsys, *arguments, tier)["result"]["points"][0]["verdict"] == verdict


class TestPipelines:
    def seconds(self, capsys: pytest.CaptureFixture[str], field: str, *arguments: str) -> list[Any]:
        points = result_of(capsys, "llama-3.1-70b", "--tp=2", "--tier=dram=50GB/s", *arguments)["result"]["points"]
        return [point[field] for point in points]

    def test_one_more_token_never_makes_a_prefill_faster(self, capsys: pytest.CaptureFixture[str]) -> None:
        tokens = "--tokens=8191,8192,8193,16384,16385"
        for mode in ("exact", "active-params"):
            times = self.seconds(capsys, "t_recompute_s", "--pp=4", tokens, f"--flops-mode={mode}")
            assert times == sorted(times)

    def test_a_pipeline_is_no_faster_than_its_share_and_no_slower_than_one_stage(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for mode in ("exact", "active-params"):
            whole, piped = self.seconds(
                capsys, "t_recompute_s", "--pp=1,4", "--tokens=65536", f"--flops-mode={mode}", "--efficiency=0.5"
            )
            assert whole / 4 < piped < whole

    def test_a_prompt_of_one_chunk_passes_every_stage_in_turn(self, capsys: pytest.CaptureFixture[str]) -> None:
        whole, piped = self.seconds(capsys, "t_recompute_s", "--pp=1,4", "--tokens=4096")
        assert piped == pytest.approx(whole)

    def test_the_suffix_that_hides_a_layer_does_not_depend_on_the_number_of_stages(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = self.seconds(capsys, "suffix_break_even_tokens", "--pp=1,2,4", "--tokens=32768")
        assert len(set(found)) == 1


class TestLayouts:
    def point(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = result_of(capsys, *arguments)["result"]["points"][0]
        return found

    def test_bytes_per_token_are_those_of_a_rank_under_ring_context_parallelism(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        point = self.point(
            capsys, "qwen3-235b-a22b", "--tp=8", "--cp=8", "--cp-mode=ring", "--tokens=32768", "--tier=dram=50GB/s"
        )
        assert point["bytes_per_token"] == 192512 / 8
        assert point["rank_bytes"] == 32768 * 192512 / 8

    def test_the_smallest_useful_prefix_does_not_depend_on_the_prefix_asked(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        points = result_of(
            capsys,
            "deepseek-v3.2",
            "--tp=8",
            "--cp=8",
            "--cp-mode=dcp",
            "--tier=file=7GB/s,1ms",
            "--tokens=1024,131072",
        )["result"]["points"]
        assert points[0]["smallest_useful_tokens"] == points[1]["smallest_useful_tokens"]

    @pytest.mark.parametrize(
        ("model", "tier"),
        [
            ("deepseek-v3", "remote=25GB/s,2ms"),
            ("kimi-k2", "remote=25GB/s,2ms"),
            ("llama-3.1-70b", "file=7GB/s,200us"),
            ("gpt-oss-120b", "file=7GB/s,5ms"),
            ("qwen3-next-80b-a3b", "file=7GB/s,5ms"),
        ],
    )
    def test_the_smallest_useful_prefix_is_where_loading_first_pays(
        self, model: str, tier: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = (model, "--tp=8", "--gpu=H100-SXM", f"--tier={tier}")
        least = self.point(capsys, *arguments, "--tokens=4096")["smallest_useful_tokens"]
        assert least > 1
        before, at = result_of(capsys, *arguments, f"--tokens={least - 1},{least}")["result"]["points"]
        assert before["ratio"] < 1 <= at["ratio"]

    def test_the_smallest_useful_prefix_of_linear_compute_is_the_formula(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        config = ("mamba-codestral-7b", "--tokens=4096", "--tier=dram=50GB/s,10ms", "--efficiency=0.5")
        point = self.point(capsys, *config)
        per_token_s = point["t_recompute_s"] / 4096
        formula = (10e-3 + point["rank_bytes"] / 50e9) / per_token_s
        assert point["smallest_useful_tokens"] == pytest.approx(formula, abs=1)

    def test_collectives_of_a_restore_count_the_layers_that_hold_rows(self, capsys: pytest.CaptureFixture[str]) -> None:
        point = self.point(
            capsys, "kimi-linear-48b-a3b", "--tp=8", "--tokens=16384", "--tier=dram=50GB/s",
            "--limit=alpha_collective=15us", "--limit=collective=300GB/s",
        )  # fmt: skip
        serial = next(s for s in point["strategies"] if s["name"] == "fixed_source_broadcast_serial")
        rows, state = point["rank_bytes"] - point["state_bytes"], point["state_bytes"]
        assert serial["t_s"] == pytest.approx(state / 50e9 + rows / 50e9 + 7 * 15e-6 + rows / 300e9)

    def test_mfu_of_a_pipeline_counts_its_bubbles(self, capsys: pytest.CaptureFixture[str]) -> None:
        point = self.point(
            capsys, "llama-3.1-70b", "--tp=2", "--pp=4", "--tokens=8192", "--efficiency=0.5", "--tier=dram=50GB/s"
        )
        assert point["mfu_ratio"] == pytest.approx(0.125)
        assert point["t_recompute_active_params_s"] == pytest.approx(point["t_recompute_floor_s"], rel=0.05)

    def test_the_first_token_waits_for_the_load_that_is_not_hidden_and_for_the_suffix(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ("qwen3-32b", "--tp=4", "--tokens=16384", "--suffix=512", "--tier=dram=50GB/s")
        point = self.point(capsys, *arguments)
        _, text, _ = run(capsys, *arguments)
        ttft_ms = (point["t_load_s"] + point["t_suffix_s"]) * 1e3
        assert f"with 512 new tokens the first token comes after {ttft_ms:.1f} ms" in text

    def test_host_memory_per_token_counts_the_copies_a_strategy_keeps(self, capsys: pytest.CaptureFixture[str]) -> None:
        point = self.point(capsys, "deepseek-v3", "--tp=8", "--tokens=4096", "--tier=dram=50GB/s")
        assert point["host_bytes_per_token"] == 8 * 70272
        assert point["shared_host_bytes_per_token"] == 70272

    def test_sharded_state_is_loaded_in_full_by_every_strategy(self, capsys: pytest.CaptureFixture[str]) -> None:
        point = self.point(capsys, "qwen3-next-80b-a3b", "--tp=8", "--tokens=1024", "--tier=dram=50GB/s")
        native = next(s for s in point["strategies"] if s["name"] == "native_sequence_sharding")
        rows, state = point["rank_bytes"] - point["state_bytes"], point["state_bytes"]
        assert state > 0
        # Four ranks hold each of the two KV heads.
        assert native["t_s"] == pytest.approx((rows / 4 + state) / 50e9)

    def test_a_recurrent_model_has_nothing_to_split(self, capsys: pytest.CaptureFixture[str]) -> None:
        point = self.point(capsys, "mamba-codestral-7b", "--tokens=100000", "--tier=dram=50GB/s")
        assert point["split_tokens"] == 0
        assert point["split_t_s"] == point["t_load_s"]
        assert point["bytes_per_token"] == 0

    def test_a_strategy_changes_rate_intensity_and_verdict_together(self, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ("deepseek-v3", "--tp=8", "--tokens=32768", "--tier=file=7GB/s", "--efficiency=1.0")
        plain = self.point(capsys, *arguments)
        native = self.point(capsys, *arguments, "--strategy=native")
        assert native["t_load_s"] == pytest.approx(plain["t_load_s"] / 8)
        for point in (plain, native):
            assert (point["i_cache"] > point["i_hardware"]) == (point["ratio"] > 1)

    def test_a_strategy_that_cannot_be_timed_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, _, err = run(
            capsys, "deepseek-v3", "--tp=8", "--gpu=MI250X", "--peak-flops=383e12", "--strategy=allgather",
            "--tier=dram=20GB/s", "--tokens=1024",
        )  # fmt: skip
        assert (code, "--limit collective" in err) in ((0, False), (2, True))
        point = self.point(
            capsys, "deepseek-v3", "--tp=8", "--strategy=allgather", "--efficiency=0.5", "--tier=dram=50GB/s",
            "--tokens=32768",
        )  # fmt: skip
        row = next(s for s in point["strategies"] if s["name"] == point["strategy"])
        assert point["t_load_s"] == pytest.approx(row["t_s"])


class TestSweeps:
    def test_every_combination_is_a_point_and_what_cannot_be_is_skipped_with_its_reason(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        document = result_of(
            capsys, "qwen2.5-7b", "llama-3.1-8b", "--tp=1,4,8", "--tokens=1024,4096", "--kv-dtype=bf16,fp8",
            "--tier=dram=50GB/s",
        )  # fmt: skip
        result = document["result"]
        # qwen2.5-7b has 28 heads, which 8 ranks cannot divide.
        assert len(result["points"]) == (2 + 3) * 2 * 2
        assert [skip["what"] for skip in result["skipped"]] == ["qwen2.5-7b TP 8 bf16", "qwen2.5-7b TP 8 fp8"]
        assert "does not divide the 28 heads" in result["skipped"][0]["reason"]

    def test_a_thousand_points_render_and_round_trip(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        tokens = ",".join(str(512 + 128 * i) for i in range(250))
        out = tmp_path / "sweep.json"
        code, table, _ = run(
            capsys, "qwen3-8b", "--tp=1,2,4,8", f"--tokens={tokens}", "--tier=dram=50GB/s", f"--out={out}"
        )
        assert code == 0
        assert len(read_document(out).result.points) == 1000
        assert "960 more rows" in table

    def test_every_number_of_a_result_has_an_origin(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "result.json"
        for arguments in (
            ["deepseek-v3.2", "--tp=8", "--kv-dtype=fp8_ds_mla"],
            ["nemotron-3-nano-30b-a3b", "--hit=dram=0.5", "--hit=miss=0.5"],
        ):
            assert main(["load-vs-recompute", *arguments, "--tokens=4096", f"--out={out}", "--quiet"]) == 0
            assert numbers_without_origin(read_document(out)) == ()
        capsys.readouterr()

    def test_ctrl_c_keeps_the_points_done_so_far(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done: list[int] = []
        original = Series.point

        def point(series: Series, tokens: int, suffix_tokens: int = 0) -> Any:
            if len(done) == 3:
                raise KeyboardInterrupt
            done.append(tokens)
            return original(series, tokens, suffix_tokens)

        monkeypatch.setattr(Series, "point", point)
        out = tmp_path / "partial.json"
        code, _, err = run(capsys, "qwen3-8b", "--tokens=1,2,3,4,5,6", "--tier=dram=50GB/s", f"--out={out}")
        assert code == 1
        assert "interrupted" in err
        document = read_document(out)
        assert document.interrupted
        assert [found.tokens for found in document.result.points] == [1, 2, 3]


@pytest.fixture
def saved_paths(tmp_path: Path, host: Host, measured_path: MeasuredPath) -> Path:
    limits = (
        Limit(name="uplink", value=50e9, origin=MADE_UP),
        Limit(name="ranks_per_uplink", value=4.0, origin=MADE_UP),
    )
    document: Document[HostPaths] = new_document(
        HostPaths(paths=(measured_path,), limits=limits),
        command_line=("made", "by", "a", "test"),
        provenance={},
        host=host,
    )
    path = tmp_path / "paths.json"
    write_document(document, path)
    return path


class TestSources:
    def test_a_saved_probe_replaces_the_priors_and_is_labelled_measured(
        self, saved_paths: Path, measured_path: MeasuredPath, capsys: pytest.CaptureFixture[str]
    ) -> None:
        document = result_of(capsys, "qwen3-8b", "--tokens=4096", f"--probe={saved_paths}")
        (point,) = document["result"]["points"]
        assert point["tier_bytes_per_s"] == measured_path.bytes_per_s
        assert point["t_load_fixed_s"] == measured_path.fixed_s
        assert document["provenance"]["t_load_s"]["provenance"] == "measured"
        assert document["provenance"]["t_recompute_s"]["provenance"] == "modelled"

    def test_a_measurement_stretched_to_more_ranks_is_not_called_measured_and_is_doubted(
        self, saved_paths: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        document = result_of(capsys, "llama-3.1-70b", "--tp=8", "--tokens=4096", f"--probe={saved_paths}")
        assert document["provenance"]["t_load_s"]["provenance"] == "modelled"
        codes = [warning["code"] for warning in document["warnings"]]
        assert "measured-with-fewer-loads" in codes
        assert "measured-into-host-memory" in codes

    def test_a_typed_limit_replaces_the_catalogues_and_a_tier_is_checked_against_it(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ("qwen3-8b", "--tokens=4096", "--tier=dram=70GB/s")
        wide = result_of(capsys, *arguments, "--limit=pcie=100GB/s")
        assert wide["result"]["points"][0]["rank_bytes_per_s"] == 70e9
        narrow = result_of(capsys, *arguments, "--limit=pcie=25GB/s", code=3)
        assert narrow["result"]["points"][0]["rank_bytes_per_s"] == 25e9

    def test_a_typed_tier_wins_over_a_saved_one_of_the_same_name(
        self, saved_paths: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        document = result_of(capsys, "qwen3-8b", "--tokens=4096", f"--probe={saved_paths}", "--tier=dram=20GB/s")
        assert document["result"]["points"][0]["tier_bytes_per_s"] == 20e9
        assert document["provenance"]["t_load_s"]["provenance"] == "modelled"

    def test_limits_of_a_saved_topology_bound_every_rank(
        self, saved_paths: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ("llama-3.1-70b", "--tp=8", "--tokens=4096", "--tier=dram=50GB/s", f"--topo={saved_paths}")
        point = result_of(capsys, *arguments)["result"]["points"][0]
        assert point["limited_by"] == "uplink shared by 4"
        assert point["rank_bytes_per_s"] == 50e9 / 4

    def test_a_result_without_paths_is_refused_by_its_kind(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "answer.json"
        run(capsys, "qwen3-8b", "--tokens=1024", f"--out={out}")
        code, _, err = run(capsys, "qwen3-8b", f"--probe={out}")
        assert code == 2
        assert "kind 'load-vs-recompute' holds no paths" in err

    def test_the_same_answer_comes_out_of_the_saved_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "answer.json"
        _, first, _ = run(capsys, "qwen3-8b", "--tokens=1024,8192", f"--out={out}")
        assert main(["report", str(out)]) == 0
        assert capsys.readouterr().out == first


class TestImpossibleInput:
    def test_hit_shares_that_do_not_sum_to_one_are_named_and_exit_3(self, capsys: pytest.CaptureFixture[str]) -> None:
        seed = [f"--hit={share}" for share in ("hbm=78%", "dram=14%", "file=6%", "remote=2%", "miss=2%")]
        document = result_of(capsys, "qwen3-32b", "--tp=4", "--tokens=200000", *seed, code=3)
        assert "impossible-hit-shares" in [warning["code"] for warning in document["warnings"]]

    def test_the_second_articles_rate_is_above_the_roofline(self, capsys: pytest.CaptureFixture[str]) -> None:
        document = result_of(
            capsys, "llama-3.1-70b", "--tp=4", "--tokens=200000", "--gpu=A100-SXM-80", "--hit=hbm=0.3",
            "--hit=miss=0.7", "--claimed-rate=10.4", code=3,
        )  # fmt: skip
        (warning,) = [w for w in document["warnings"] if w["code"] == "impossible-request-rate"]
        assert "one miss keeps all ranks busy for 63.9 s" in warning["message"]

    def test_its_bytes_per_token_contradict_the_config(self, capsys: pytest.CaptureFixture[str]) -> None:
        document = result_of(capsys, "qwen3-32b", "--tokens=4096", "--claimed-bytes-per-token=512KiB", code=3)
        (warning,) = [w for w in document["warnings"] if w["code"] == "impossible-bytes-per-token"]
        assert "stores 262144 B" in warning["message"]
        assert "2.00 times" in warning["message"]

    def test_a_rate_that_all_ranks_together_can_serve_is_not_impossible(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        # One group's latency is not the capacity: eight DP groups prefill eight requests at once.
        dp = ("deepseek-v3", "--tp=8", "--dp-attention=8", "--tokens=8192", "--claimed-rate=10")
        pp = ("llama-3.1-70b", "--tp=2", "--pp=4", "--tokens=8192", "--claimed-rate=6")
        for arguments in (dp, pp):
            result_of(capsys, *arguments, code=0)
        result_of(capsys, *pp[:-1], "--claimed-rate=7", code=3)

    def test_bytes_per_token_inside_a_window_are_not_impossible(self, capsys: pytest.CaptureFixture[str]) -> None:
        for size in ("496KiB", "80KiB"):  # all 62 layers grow below the window, the 10 global ones beyond
            result_of(capsys, "gemma-3-27b", "--tokens=1024,131072", f"--claimed-bytes-per-token={size}", code=0)

    def test_a_tier_above_its_link_is_named_and_the_link_is_used(self, capsys: pytest.CaptureFixture[str]) -> None:
        document = result_of(capsys, "qwen3-8b", "--tokens=4096", "--tier=dram=400GB/s", code=3)
        assert document["result"]["points"][0]["rank_bytes_per_s"] == 63.02e9
        assert "impossible-tier-rate" in [warning["code"] for warning in document["warnings"]]


SMALL_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "vocab_size": 1000,
}


def config_file(folder: Path, text: str) -> str:
    path = folder / "config.json"
    path.write_text(text)
    return str(path)


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "parts"),
        [
            (["qwen3-8b", "--tp=3"], ["attention TP 3", "32 heads", "use one of 1, 2, 4"]),
            (["qwen3-8b", "--tokens=-5"], ["--tokens -5", "between 1"]),
            (["qwen3-8b", "--tokens=0"], ["--tokens 0"]),
            (["qwen3-8b", "--tokens=1e3"], ["--tokens", "1e3", "whole numbers"]),
            (["qwen3-8b", "--kv-dtype=float7"], ["kv dtype 'float7'", "use one of", "nvfp4"]),
            (["qwen3-8b", "--kv-dtype=fp8_ds_mla"], ["fp8_ds_mla", "MLA rows", "use bf16"]),
            (["qwen3-8b", "--gpu=H300"], ["'H300'", "did you mean", "--peak-flops"]),
            (["qwen3-8b", "--gpu=H100"], ["H100-SXM", "H100-PCIe"]),
            (["qwen3-8b", "--claimed-bytes-per-token=64M"], ["'64M'", "64MiB"]),
            (["qwen3-8b", "--tier=dram=64M"], ["'64M'", "50GB/s"]),
            (["qwen3-8b", "--tier=dram"], ["'dram'", "dram=50GB/s"]),
            (["qwen3-8b", "--tier=file:/tmp?size=1GiB"], ["real tier", "--measure"]),
            (["qwen3-8b", "--limit=speed=5"], ["no known limit", "uplink"]),
            (["qwen3-8b", "--limit=sockets=half"], ["sockets=half", "whole number"]),
            (["qwen3-8b", "--hit=dram=2"], ["dram=2", "between 0 and 1"]),
            (["qwen3-8b", "--hit=tape=1"], ["tape", "not a tier of this run"]),
            (["qwen3-8b", "--efficiency=fast"], ["--efficiency 'fast'", "auto"]),
            (["qwen3-8b", "--efficiency=1.5"], ["--efficiency 1.5", "between"]),
            (["qwen3-8b", "--peak-flops=fast"], ["'fast'", "989e12"]),
            (["qwen3-8b", "--concurrency=0"], ["--concurrency 0", "between 1"]),
            (["qwen3-8b", "--expert-imbalance=0.5"], ["--expert-imbalance 0.5"]),
            (["qwen3-8", "--tokens=5"], ["'qwen3-8'", "did you mean"]),
            (["qwen3-8b", "--measure", "--tp=2"], ["--measure", "--tp"]),
            (["qwen3-8b", "--measure", "--tokens=-5"], ["--tokens -5"]),
            (["qwen3-8b", "--loads-per-s=nan"], ["--loads-per-s nan"]),
            (["qwen3-8b", "--claimed-rate=-5"], ["--claimed-rate -5"]),
            (["qwen3-8b", "--active-params=-5"], ["--active-params -5"]),
            (["qwen3-8b", "--chunk-tokens=0"], ["--chunk-tokens 0"]),
            (["qwen3-8b", "--weight-dtype=foo"], ["weight dtype 'foo'", "nvfp4"]),
            (["qwen3-8b", "--assume=foo"], ["--assume 'foo'", "gqa"]),
            (["qwen3-8b", "--ep=2", "--tp=2"], ["ep 2 exceeds the 1 experts"]),
            (["qwen3-8b", "--limit=ranks_per_uplink=²"], ["whole number"]),
            (["qwen3-8b", "--limit=pcie="], ["--limit 'pcie='", "50GB/s"]),
            (["qwen3-8b", "--tier=dram=50GB/s", "--tier=dram=7GB/s"], ["--tier dram", "2 times"]),
            (["qwen3-8b", "--hit=dram=0.9", "--hit=dram=0.1"], ["--hit dram", "2 times"]),
            (["qwen3-8b", "--tier=dram=50GB/s,1ms,2ms"], ["says one thing twice"]),
            (["qwen3-8b", "--tokens=99999999999999999999999"], ["--tokens 1e+23", "between 1"]),
            ([""], ["model name is empty"]),
            (["qwen3-8b", "--measure", "--tier=s3://bucket"], ["s3", "dram", "file"]),
            ([], ["no MODEL", "--list"]),
        ],
    )
    def test_each_is_one_line_that_names_the_value_and_the_remedy(
        self, arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, out, err = run(capsys, *arguments)
        assert code == 2, err
        assert out == ""
        assert err.count("\n") == 1
        for part in parts:
            assert part in err

    @pytest.mark.parametrize(
        ("text", "parts"),
        [
            ('{"architectures": ["LlamaForCausalLM"], ', ["config.json", "JSON"]),
            (
                json.dumps({key: value for key, value in SMALL_LLAMA.items() if key != "num_hidden_layers"}),
                ["config.json", "num_hidden_layers is missing"],
            ),
            ('{"architectures": ["FooForCausalLM"], "num_hidden_layers": 2}', ["FooForCausalLM", "--assume gqa"]),
            ("[]", ["config.json"]),
            ("", ["config.json"]),
        ],
    )
    def test_a_broken_config_is_named_with_file_key_and_remedy(
        self, text: str, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, _, err = run(capsys, config_file(tmp_path, text))
        assert code in (1, 2)
        assert err.count("\n") == 1
        for part in parts:
            assert part in err


def test_an_unknown_architecture_is_taken_as_what_the_user_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = SMALL_LLAMA | {"architectures": ["FooForCausalLM"], "num_key_value_heads": 2}
    path = config_file(tmp_path, json.dumps(config))
    document = result_of(capsys, path, "--assume=gqa", "--tokens=100", "--tier=dram=50GB/s")
    point = document["result"]["points"][0]
    assert "assumed-architecture" in [warning["code"] for warning in document["warnings"]]
    assert point["unique_bytes"] == 2 * 2 * 2 * 64 * 2 * 100


def test_active_params_mode_needs_a_count_for_a_config_that_publishes_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_file(tmp_path, json.dumps(SMALL_LLAMA))
    code, _, err = run(capsys, path, "--flops-mode=active-params")
    assert code == 2
    assert "--active-params" in err
    point = result_of(capsys, path, "--flops-mode=active-params", "--active-params=1e6", "--tokens=100")["result"][
        "points"
    ][0]
    assert point["flops_linear"] == 2 * 10**6 * 100


@pytest.fixture
def busy_wait() -> Callable[[], float]:
    """Seconds this machine takes for a fixed piece of work, to compare other times with."""

    def seconds() -> float:
        started = time.process_time()
        sum(i * i for i in range(3_000_000))
        return time.process_time() - started

    return seconds


def test_a_thousand_points_cost_about_as_much_as_a_few_million_additions(busy_wait: Callable[[], float]) -> None:
    """A ratio to work measured in the same run; `sample_reports/load-vs-recompute` records the wall time."""
    models = ("llama-3.1-8b", "qwen3-235b-a22b", "deepseek-v3.2", "gpt-oss-120b", "qwen3-next-80b-a3b")
    question = Question(
        models=models, tp="1,2,4,8", tokens=",".join(str(1000 + 997 * i) for i in range(50)), tiers=("dram=50GB/s",)
    )
    reference_s = min(busy_wait() for _ in range(3))
    started = time.process_time()
    answer = ask(question)
    spent_s = time.process_time() - started
    assert len(answer.result.points) == 1000
    assert spent_s < 30 * reference_s
