# The trainer in a container for a TPU VM: `docker build -t pytorch-tpu .` has libtpu, --build-arg=TPU=0 leaves
# it out for CPUs, and --build-arg=STACK=torch_tpu takes TorchTPU instead of torch_xla.
#   python -m train.container build --tpu
#   python -m train.container run --tpu --data /data --output runs -- main.py --config ...
FROM python:3.11.14-slim-bookworm AS environment
ARG TPU=1
ARG STACK=torch_xla
# What pip needs to know of this machine, such as another index; empty: its defaults.
ARG PIP_ARGUMENTS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
RUN python -m venv /venv
# Dependencies first: a change of the code leaves this layer as it is.
COPY requirements.txt requirements-torch-tpu.txt ./
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN if [[ "${STACK}" == torch_tpu ]]; then \
         grep -vE '^(torch|torchvision|torch_xla)==' requirements.txt > all.txt \
         && cat requirements-torch-tpu.txt >> all.txt; \
       else cp requirements.txt all.txt; fi \
    && grep -E '^(torch|torchvision|torch_xla)==' all.txt > constraints.txt \
    && read -ra arguments <<< "${PIP_ARGUMENTS}" \
    && /venv/bin/pip install "${arguments[@]}" --constraint constraints.txt --requirement all.txt \
    && if [[ "${TPU}${STACK}" == 1torch_xla ]]; then \
         xla="$(grep '^torch_xla==' constraints.txt)" \
         && /venv/bin/pip install "${arguments[@]}" --constraint constraints.txt \
            "${xla/torch_xla/torch_xla[tpu]}"; \
       fi

FROM python:3.11.14-slim-bookworm
# tcmalloc: the input pipeline allocates much and often; git: runs write their commit down.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
       git=1:2.39.* libgomp1=12.* libtcmalloc-minimal4=2.10-* \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 trainer
COPY --from=environment /venv /venv
ENV PATH=/venv/bin:$PATH \
    LD_PRELOAD=libtcmalloc_minimal.so.4 \
    PYTHONUNBUFFERED=1
USER 1000
WORKDIR /home/trainer
COPY --chown=trainer:trainer . .
ENTRYPOINT ["python"]
CMD ["main.py", "--help"]
