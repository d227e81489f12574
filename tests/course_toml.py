# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A configuration of the course project, with keys that have no meaning here."""

COURSE_TOML = """
job = {dump_folder = "./outputs", description = "a course project", use_for_integration_test = true}
optimizer = {name = "AdamW", lr = 1e-4}
float8 = {enable_float8_linear = false}
activation_checkpoint = {mode = 'selective', selective_ac_option = '2'}

[profiling]
enable_profiling = true
save_traces_folder = "profile_trace"
profile_freq = 500
enable_memory_snapshot = false
save_memory_snapshot_folder = "memory_snapshot"

[metrics]
log_freq = 1
sample_freq = 100
sample_batch_size = 16
enable_color_printing = true
enable_tensorboard = true
save_tb_folder = "tb"
enable_wandb = false

[dataset]
batch_size = -1
dataset_name = "imagenet_dummy"
root_dir = "/datasets/imagenet.safetensors"
num_workers = 4
image_size = [64, 64]
num_classes = 1000

[model]
name = "llama3_diffusion"
flavor = "DiT-L"
norm_type = "rmsnorm"
tokenizer_path = "./test/assets/tokenizer.model"
input_channels = 16
patch_size = 2

[training]
batch_size = 125
seq_len = -1
warmup_steps = 100
max_norm = 1.0
steps = 2000000
data_parallel_replicate_degree = 1
data_parallel_shard_degree = 1
tensor_parallel_degree = 1
compile = false
dataset = "c4_test"

[experimental]
context_parallel_degree = 1
pipeline_parallel_degree = 1
enable_async_tensor_parallel = false

[checkpoint]
enable_checkpoint = false
folder = "checkpoint"
interval_type = "steps"
interval = 10
model_weights_only = false
export_dtype = "float32"
async_mode = "disabled"
"""
