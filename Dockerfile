# TorchDiTan on an NVIDIA or AMD GPU. Written for readers and not yet built by its authors, who have no network to pull
# the base images with: tell us what is wrong with it.
#   docker build -t torchditan .
#   docker build -t torchditan --build-arg INDEX=rocm6.4 --build-arg BASE=rocm/dev-ubuntu-24.04:6.4-complete .
#   docker run --gpus all --ipc=host -v $PWD/outputs:/workspace/outputs torchditan \
#       torchrun --nproc_per_node=8 train.py --job.config_file imagenet_pixels --dataset.root_dir /data
ARG BASE=ubuntu:24.04
FROM ${BASE}
ARG INDEX=cu128
ARG TORCH=2.11.0
ENV DEBIAN_FRONTEND=noninteractive PIP_BREAK_SYSTEM_PACKAGES=1 PYTHONUNBUFFERED=1
# The compiler and the headers are torch.compile's.
RUN apt-get update && apt-get install -y --no-install-recommends \
        python3 python3-pip python3-dev python-is-python3 gcc g++ git \
    && rm -rf /var/lib/apt/lists/*
# The wheels carry CUDA or ROCm themselves; the driver is the host's. PyTorch's "Get Started" page has the address of
# its index: give it without the last part as TORCH_INDEX (--build-arg TORCH_INDEX=ADDRESS); pip's own has CUDA alone.
ARG TORCH_INDEX
RUN pip install --no-cache-dir "torch==${TORCH}" ${TORCH_INDEX:+--index-url ${TORCH_INDEX}/${INDEX}}
WORKDIR /workspace
COPY . .
RUN pip install --no-cache-dir -e '.[finetune,hub,analysis,float8]'
ENV HF_HOME=/workspace/outputs/hub
CMD ["python", "train.py", "--help"]
