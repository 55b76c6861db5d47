"""What a running program does take: logs, snapshots, samplers, the state of the machine."""

from __future__ import annotations

DOOR = {
    "growth": "FEWEST GrowthWatch StepReading WARM_UP growth_of",
    "machine": (
        "CSV_COLUMNS GpuDriver GpuProcess GpuState NoNvml csv_rows host_memory look prometheus_text publish published "
        "read_driver read_gpus"
    ),
    "memory_log": (
        "LogMoment MemoryLog StagePart lightning_memory predicted_and_measured print_gpu_memory_summary trainer_memory"
    ),
    "recorder": "record start_history stop_history",
    "sampler": "CudaMemory GpuReading GpuSource ProcessMemory Sampler allocator_counts find_gpu",
}
"""What other rooms may use, by file."""
