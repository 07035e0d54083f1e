# aligner on NVIDIA GPUs.
#
#   docker build -t aligner .
#   docker run --gpus all --ipc=host -it aligner
#
# The NGC image brings a torch built together with Apex, Transformer Engine and NCCL. They stay as
# they are: the pins below keep pip from replacing one of them, and the build fails if it did.
# Other releases: --build-arg PYTORCH=25.11-py3. Python in the image must be 3.11 or newer.
ARG PYTORCH=25.12-py3
FROM nvcr.io/nvidia/pytorch:${PYTORCH}

WORKDIR /workspace/aligner
COPY requirements.txt requirements-dev.txt ./

# The image's own constraint file (PIP_CONSTRAINT) pins everything that was in its build, also
# packages of which we need other versions. In its place: only what was built against this torch.
RUN pip list --format=freeze \
      | grep -iE '^(torch|torchvision|triton|pytorch-triton|apex|transformer[-_]engine|flash[-_]attn|numpy)==' \
      > /opt/keep.txt \
    && python -c "import torch; print(torch.__version__)" > /opt/torch-version
ENV PIP_CONSTRAINT=/opt/keep.txt

# Without the line that pins the CPU build's torch. Building extensions needs the image's torch,
# hence no isolation.
RUN grep -v '^torch==' requirements.txt > /opt/requirements.txt \
    && pip install --no-cache-dir --no-build-isolation \
         -r /opt/requirements.txt -r requirements-dev.txt \
    && test "$(python -c 'import torch; print(torch.__version__)')" = "$(cat /opt/torch-version)"

COPY . .
# Dependencies are there; resolving them again would ask for requirements.txt's torch.
RUN pip install --no-cache-dir --no-deps --no-build-isolation --editable .

# megatron-core asks for it where sequence parallelism is on.
ENV CUDA_DEVICE_MAX_CONNECTIONS=1

CMD ["bash"]
