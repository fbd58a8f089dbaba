"""The goals for GPUs: speed, the points of what was to be mended and built, one by one, and the proof that needs no GPU."""

from __future__ import annotations

from benchmarks.pages.aim import Aim, figures_of

_UNIT = "tests/unit/engine"
_TRITON = f"{_UNIT}/triton_kernels"
_KERNELS = f"{_TRITON}/test_triton_kernels.py"
_RANKS = f"{_TRITON}/test_gpu_ranks.py::test_graphs_of_several_ranks_say_what_one_says"
_RESOURCES = f"{_TRITON}/test_kernel_resources.py"
_TRANSFER = "tests/unit/kv_transfer"
_CLUSTER = "tests/unit/cluster"

_SPEED = (
    Aim("Decode attention reaches 85 % of a copy's rate at 64 x 4,096", figures_of("certify", "decode attention")),
    Aim("Prefill of an 8B shape reaches 60 % of the rate of products", figures_of("certify", "prefill")),
    Aim("A decode step of 16 rows takes 1.2 times its byte floor", figures_of("certify", "decode step")),
    Aim("A handoff between processes reaches 70 % of a copy's rate", figures_of("certify", "handoff")),
)
_STEP = (
    Aim(
        "1. Each layer has an event, and a group of layers leaves at the end of its last one",
        tests=(f"{_TRANSFER}/test_progress.py::test_each_group_leaves_at_the_end_of_its_own_last_layer",),
    ),
    Aim(
        "2. The host is one step ahead of the GPU at most",
        tests=(f"{_UNIT}/test_run_ahead.py::test_one_step_is_under_way_when_the_next_is_launched",),
    ),
    Aim(
        "3. A receive is posted when its chunk is there",
        tests=(f"{_TRANSFER}/test_nccl.py::test_a_receive_is_posted_when_its_chunk_is_there",),
    ),
    Aim(
        "3. Gathering, scattering and fingerprints are our own kernels, the latter joined with the copy; staging is double",
        tests=(
            f"{_KERNELS}::test_whole_tokens_are_gathered_and_scattered",
            f"{_KERNELS}::test_fingerprints_are_what_their_formula_says",
        ),
        absent="Staging has one buffer. Fingerprints do not join the copy: they shall find one that went to a wrong place.",
    ),
    Aim(
        "4. What serving launches was compiled before",
        tests=(
            f"{_TRITON}/test_gpu_trial.py::test_serving_launches_nothing_that_was_not_compiled",
            f"{_TRANSFER}/test_cuda_pool_view.py::test_lanes_launch_nothing_that_was_not_compiled",
        ),
    ),
    Aim(
        "4. There are graphs up to `max_batch_size`",
        tests=(f"{_TRITON}/test_gpu_trial.py::test_graphs_hold_the_largest_step",),
        absent="Up to 512 rows.",
    ),
    Aim(
        "4. Prefill workers capture decode graphs after they are ready, and one stream serves all captures",
        absent="They capture before they are ready. There is one stream, without a test.",
    ),
    Aim(
        "5. `gpu_memory_utilization` counts our memory alone, with what the largest step takes",
        tests=(
            f"{_UNIT}/test_gpu_memory.py::test_what_others_take_is_nothing_of_ours",
            f"{_UNIT}/test_gpu_checks.py::test_what_steps_leave_is_what_a_pool_may_take",
        ),
    ),
    Aim(
        "6. Decoding cuts each context by its own length alone",
        tests=(
            f"{_KERNELS}::test_an_answer_does_not_depend_on_the_sequences_beside_it",
            f"{_KERNELS}::test_parts_lie_behind_each_other",
        ),
    ),
    Aim(
        "6. Several programs of decode attention fit into a multiprocessor, and their copies are asynchronous",
        tests=(
            f"{_RESOURCES}::test_programs_fit_beside_each_other",
            f"{_RESOURCES}::test_attention_uses_matrix_units_and_asynchronous_copies",
        ),
    ),
    Aim(
        "7. Sampled ids stay on the device, and the next step is prepared while one runs",
        absent="Not built: the host waits for the sampled tokens of each step.",
    ),
    Aim(
        "7. Masks, penalties and logprobs are computed on the device, and top-p takes fewer passes",
        absent="Not built: rows that ask for them are computed on the host, and top-p is 16 passes of one program a row.",
    ),
    Aim(
        "8. A lane of a step that is over, such as a migration's, waits for the device",
        tests=(f"{_TRANSFER}/test_progress.py::test_a_step_that_is_over_is_waited_for_on_the_device_too",),
    ),
    Aim(
        "8. A thread that launches is not nicer than others",
        absent="Not built: prefill's thread is nicer on a GPU, too.",
    ),
    Aim(
        "8. KV goes by CUDA IPC between processes that Ray shows one GPU each",
        tests=(
            "tests/unit/worker/test_visible_gpus.py::test_its_own_come_first",
            f"{_TRANSFER}/test_cuda_ipc.py::test_memory_that_can_not_be_reached_is_a_refusal",
        ),
        absent="It has run on one GPU, not between two.",
    ),
)
_MORE = (
    Aim(
        "9. Collectives are part of the graphs, all ranks capture in one order, and the pool is the smallest rank's",
        tests=(_RANKS, "tests/gpu/test_gpu_ranks.py::test_two_ranks_say_what_one_says"),
        absent="Ranks on two GPUs have not run.",
    ),
    Aim("9. A follower is done when its GPU is", tests=(f"{_UNIT}/test_run_ahead.py::test_a_follower_is_not_ahead",)),
    Aim(
        "9. A sum over ranks has one order, whatever the number of rows",
        tests=(f"{_TRITON}/test_gpu_ranks.py::test_parts_are_added_in_their_order_and_rounded_once",),
    ),
    Aim(
        "9. torch's NCCL group aborts what failed, and a test shows what the installed torch then does",
        absent="The setting is there. No test fails a rank of a group over NCCL.",
    ),
    Aim("9. Block tables go to the ranks as deltas", absent="Not built: a plan has whole tables."),
    Aim("9. A gang spans several nodes", absent="Not built: all ranks of a worker are on one node."),
    Aim(
        "10. Weights in fp8, int8 and int4 stay small on a GPU",
        absent="Not built: they are unpacked when the model is loaded.",
    ),
    Aim(
        "10. Weights go from pinned memory straight to the device, in parallel",
        absent="Not built: tensors are read into plain memory and copied, one after the other.",
    ),
    Aim(
        "11. Prefill attention uses wgmma, TMA and warp specialization",
        tests=(f"{_RESOURCES}::test_attention_uses_matrix_units_and_asynchronous_copies",),
        absent="wgmma alone. Products use TMA, attention does not; no kernel has specialized warps.",
    ),
    Aim(
        "12. A GPU that is too old or too small is refused with what would fit",
        tests=(
            f"{_UNIT}/test_gpu_checks.py::test_an_old_gpu_is_named_with_what_is_needed",
            f"{_UNIT}/test_gpu_checks.py::test_a_pool_that_is_too_large_is_refused_with_the_largest_that_fits",
        ),
    ),
    Aim(
        "12. Workers share the GPUs without YAML, and there are examples for 1, 8 and 16 GPUs",
        tests=(
            f"{_CLUSTER}/test_gpu_shares.py::test_workers_share_the_gpus_evenly",
            f"{_CLUSTER}/test_gpu_examples.py::test_weights_and_pools_fit_into_its_gpus",
            f"{_CLUSTER}/test_ray_cluster_yaml.py::test_each_role_has_instances_of_its_own",
        ),
        absent="The examples have not run on that hardware.",
    ),
    Aim(
        "13. `tandem certify` proves a machine in 20 minutes, and a part that fails leaves the rest",
        tests=(
            "tests/unit/certify/test_report.py::test_all_parts_together_take_less_than_twenty_minutes",
            "tests/unit/certify/test_runner.py::test_a_part_that_hangs_is_ended_with_its_children",
            "tests/integration/test_certify.py::test_a_whole_rehearsal_passes",
        ),
        absent="Beside vLLM it has not run. No committed report has a cluster on a GPU.",
    ),
)
_PROOF = (
    Aim(
        "Proof: 2 to 8 ranks over gloo equal one, in equal order of collectives; one is killed at capture",
        tests=(_RANKS, f"{_TRITON}/test_gpu_ranks.py::test_a_rank_that_dies_in_a_capture_ends_the_others"),
    ),
    Aim(
        "Proof: a C library with NCCL's symbols over sockets, under our calls in two processes",
        tests=(f"{_TRANSFER}/test_nccl_processes.py",),
        absent="For the lanes of KV alone: ranks use the NCCL that torch brings.",
    ),
    Aim("Proof: decoder, sampler and lanes under FakeTensorMode, and a table of peak memory", absent="Not built."),
    Aim("Proof: pools beyond 2^31 elements", tests=(f"{_UNIT}/test_large_pools.py",)),
    Aim(
        "Proof: instructions, spills and occupancy of kernels for 8.0, 8.9, 9.0 and 10.0, by two versions of Triton, with a "
        "bound of each from FLOP and bytes",
        tests=(_RESOURCES,),
        absent="By one version, without 10.0 and bounds. Up to 112 bytes a thread may be spilled, on 9.0 in float32 alone.",
    ),
    Aim(
        "The host takes 1.5 ms for a decode step of 128 rows",
        figures_of("host_step", "host's part of a decode step of 128"),
        absent="Without CUDA's own calls: a stand-in for libcuda was not built.",
    ),
    Aim(
        "A test that needs a GPU says what it needs",
        tests=("tests/gpu/test_gpu_transports.py", "tests/gpu/test_on_one_gpu.py"),
        absent="It names a GPU, two, or NCCL, not the build of torch.",
    ),
    Aim(
        "A device that fails ends its worker, and its streams go on elsewhere",
        tests=("tests/fault/test_device_faults.py",),
        absent="By injected faults.",
    ),
    Aim(
        "The arithmetic has a name on GPUs",
        tests=(f"{_UNIT}/test_arithmetic.py",),
        absent="The name's form is tested. What stands in it on a GPU is in a committed report.",
    ),
    Aim("The start of a 70B model is estimated from measured rates of reading", absent="Not done."),
)

GPU_AIMS: tuple[Aim, ...] = (*_SPEED, *_STEP, *_MORE, *_PROOF)
"""What was asked for GPUs. Points keep the numbers that they were asked by."""
