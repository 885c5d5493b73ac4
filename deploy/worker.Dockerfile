# The worker's image for the CPU (ONNX Runtime). The models are not in it: mount them at /models.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/npufleet/bin:$PATH
RUN python3 -m venv /opt/npufleet
WORKDIR /src
# The dependencies are installed first, with empty packages in place of ours, so that a change of
# our source does not fetch them again.
COPY LICENSE README.md constraints.txt pyproject.toml ./
RUN mkdir -p shared/npufleet gateway/npufleet_gateway worker/npufleet_worker \
    && echo '__version__ = "0"' > shared/npufleet/__init__.py \
    && touch gateway/npufleet_gateway/__init__.py worker/npufleet_worker/__init__.py \
    && pip install --constraint constraints.txt '.[worker,onnx]'
COPY shared shared
COPY gateway gateway
COPY worker worker
RUN pip install --no-deps .

FROM ${BASE_IMAGE}
COPY --from=build /opt/npufleet /opt/npufleet
# A number, so that Kubernetes can see that it is not root.
RUN useradd --uid 10001 --no-create-home --home-dir /nonexistent npufleet
USER 10001:10001
ENV PATH=/opt/npufleet/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    NPUFLEET_MODELS=/models NPUFLEET_WORKER_HTTP_HOST=0.0.0.0 NPUFLEET_WORKER_HTTP_PORT=9100 \
    NPUFLEET_LOG_FORMAT=json
EXPOSE 9100
ENTRYPOINT ["npufleet", "worker"]
