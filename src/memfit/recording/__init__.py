"""What a running program does take: logs, snapshots, samplers, the state of the machine."""

from __future__ import annotations

DOOR = {
    "callbacks": "lightning_memory trainer_memory",
    "growth": "FEWEST GrowthWatch StepReading WARM_UP growth_of",
    "machine": (
        "CSV_COLUMNS GpuDriver GpuProcess GpuState NoNvml csv_rows host_memory look prometheus_text read_driver "
        "read_gpus"
    ),
    "memory_log": "LogMoment MemoryLog StagePart predicted_and_measured print_gpu_memory_summary",
    "recorder": "record start_history stop_history",
    "sampler": "CudaMemory GpuReading GpuSource ProcessMemory Sampler find_gpu",
    "status": "publish published",
}
"""What other rooms may use, by file."""
