# CPU image: lpx with the embedded OpenVINO engine and tritonserver.
#   docker build -t lpx .
#   docker run --rm --shm-size=1g -v "$PWD:/work" lpx build recipe.yaml
# Layers: system, dependencies (change with pyproject.toml), lpx itself (changes with the code).
FROM python:3.11-slim AS cpu

# What the embedded tritonserver links to beside its own libraries.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libstdc++6 zlib1g \
 && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 \
    LPX_CACHE=/cache HF_HOME=/cache/huggingface

# Dependencies first: a stand-in package of the same metadata keeps this layer while only code changes.
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
RUN mkdir -p lpxbuild model_repo recipes \
 && printf '__version__ = "0"\n' > lpxbuild/__init__.py \
 && pip install '.[embedded,gguf]' \
 && pip uninstall --yes lpxbuild

COPY lpxbuild lpxbuild
COPY model_repo model_repo
COPY recipes recipes
RUN pip install --no-deps .

RUN useradd --create-home --uid 1000 lpx && mkdir /work /cache && chown lpx:lpx /work /cache
USER lpx
WORKDIR /work
VOLUME /cache
EXPOSE 8000 8001 8002
ENTRYPOINT ["lpx"]
CMD ["--help"]
