# The server, from the wheel, as a user without privileges. docs/how-to/serve.md shows how to run it.
#
#   docker build -t pluralign .
#   docker build -t pluralign --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .      # for an NVIDIA GPU

ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY LICENSE README.md pyproject.toml setup.py ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG EXTRAS=server,encoders
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1
WORKDIR /install
COPY constraints.txt ./
COPY --from=build /wheels ./
# torch is installed first, by itself, from its own index: the default index would add gigabytes of CUDA packages.
RUN pip install --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"
RUN pip install --constraint constraints.txt "$(echo ./pluralign-*.whl)[$EXTRAS]"

# Downloaded models go to the home folder. The server writes no text to disk.
RUN useradd --create-home --uid 10001 pluralign
USER 10001
WORKDIR /home/pluralign
ENV PLURALIGN_CACHE=/home/pluralign/.cache/pluralign

# The ensemble is mounted at /ensemble. The API key comes from the environment at run time: PLURALIGN_API_KEY.
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
ENTRYPOINT ["pluralign"]
CMD ["serve", "/ensemble", "--host", "0.0.0.0", "--port", "8000"]
