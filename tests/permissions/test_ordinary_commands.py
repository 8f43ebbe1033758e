"""
Ordinary command lines, from guides, workflows and makefiles, beside rules that deny one program.
"""

from __future__ import annotations

import pytest

from stepengine.data.json import freeze_object
from stepengine.data.tools import ToolSpec
from stepengine.permissions import Policy, Request, Rule

RUNS = ToolSpec("run_terminal_command", category="execute")

LINES = r"""
git status
git diff --stat HEAD~1
git log --oneline -20
git log --oneline | head -5
git add -A && git commit -m "Fix the parser"
git add . && git status --short
git checkout -b feature/push-button
git fetch origin && git rebase origin/main
git pull --rebase
git stash && git checkout main && git stash pop
git diff --name-only origin/main...HEAD | grep '\.py$'
git rev-parse --abbrev-ref HEAD
git ls-files | xargs wc -l
git ls-files '*.py' | xargs grep -n TODO
git clone --depth 1 https://github.com/psf/requests.git && cd requests
git submodule update --init --recursive
git tag -a v1.0 -m "version 1.0"
git rm --cached config.ini
git config user.name "Ann"
git show HEAD:README.md | head -20
git blame -L 10,20 src/app.py
git branch --merged | grep -v main
git log --format='%h %s' --since="2 weeks ago"
git remote -v
git describe --tags --always
git worktree add ../hotfix main
git -C subdir status
git -c core.pager=cat log -3
git cherry-pick abc123 && git log -1
git diff > /tmp/changes.patch
git apply --check fix.patch
git grep -n "def main"
git merge --no-ff feature
git reset --hard HEAD~1
git clean -fdx
VERSION=$(git describe --tags) && echo "$VERSION"
echo "Current branch: $(git branch --show-current)"
for f in $(git diff --name-only); do wc -l "$f"; done
if git diff --quiet; then echo clean; else echo dirty; fi
test -z "$(git status --porcelain)" || echo "uncommitted changes"
cd src && git status
npm ci
npm install
npm install --save-dev typescript
npm run build
npm run build && npm test
npm test -- --coverage
npm run lint -- --fix
npm ci && npm run build --if-present && npm test
npm list --depth=0
npm outdated
npm view react version
npm cache clean --force
npm rm lodash
npm init -y
npm audit fix
npx tsc --noEmit
npx eslint src --ext .ts,.tsx
npx prettier --check .
npx create-react-app my-app
yarn install --frozen-lockfile
yarn build
yarn add react
pnpm install && pnpm build
pnpm run test
node index.js
node --version
node -e "console.log(process.version)"
node -p "require('./package.json').version"
pip install -r requirements.txt
pip install -e .
pip install -e '.[dev]'
pip install --upgrade pip
pip install --upgrade pip setuptools wheel
python -m pip install --upgrade pip
python -m pip install -r requirements.txt -r requirements-dev.txt
python -m venv .venv && source .venv/bin/activate && pip install -r requirements.txt
python3 -m venv venv
. venv/bin/activate && pytest
source venv/bin/activate
pip freeze > requirements.txt
pip list | grep -i django
pip show requests
pip uninstall -y package
pip install git+https://github.com/psf/requests.git
uv pip install -e ".[test]"
uv sync --all-extras
uv run pytest -q
uv run ruff check --fix .
poetry install
poetry run pytest
pytest
pytest -x -q
pytest tests/test_app.py::test_login -v
pytest -k "not slow" --cov=src --cov-report=term-missing
pytest -n auto --dist loadfile
pytest 2>&1 | tail -20
python -m pytest tests/ -v --tb=short 2>&1 | head -100
python -m unittest discover -s tests
python -m http.server 8000
python -m json.tool data.json
python manage.py migrate
python manage.py runserver 0.0.0.0:8000
python manage.py makemigrations && python manage.py migrate
python setup.py sdist bdist_wheel
python -m build
python -m build && twine check dist/*
python -c "import sys; print(sys.version)"
python -c "import re; print(re.compile('a+').findall('aa'))"
python -c "import numpy; print(numpy.__version__)"
python -c "import json; print(json.load(open('a.json'))['evaluation'])"
python3 -c "from app import create_app; create_app()"
python script.py --input data.csv --output out.csv
cat data.json | python -m json.tool
cat data.json | python3 -c "import json,sys; print(json.load(sys.stdin)['name'])"
PYTHONPATH=src python -m app
PYTHONPATH=. pytest tests
DJANGO_SETTINGS_MODULE=app.settings python manage.py check
NODE_ENV=production npm run build
CI=true npm test
export PATH="$HOME/.local/bin:$PATH" && poetry --version
mypy src
mypy --strict src tests
ruff check . && ruff format --check .
black --check .
flake8 src tests --max-line-length=100
isort --check-only .
tox -e py311
nox -s tests
pre-commit run --all-files
coverage run -m pytest && coverage report
sphinx-build -b html docs docs/_build
mkdocs build --strict
docker build -t app .
docker build -t app:latest --build-arg VERSION=1.0 .
docker run --rm -it -p 8080:80 app
docker run --rm app pytest
docker run -d --name db -e POSTGRES_PASSWORD=x postgres:16
docker ps -a
docker rm old
docker rm -f $(docker ps -aq)
docker rmi app:old
docker images
docker logs -f web
docker exec -it web bash
docker exec web python manage.py migrate
docker compose up -d
docker compose up -d --build
docker compose down -v
docker compose logs web
docker compose run --rm web pytest
docker compose exec web python manage.py migrate
docker-compose up -d
docker pull postgres:16
docker tag app registry.example.org/app
docker system prune -f
docker network create net
docker inspect web | jq '.[0].State'
docker volume rm data
make
make test
make -j4
make -j$(nproc)
make clean && make
make build test lint
make -C docs html
make install PREFIX=/usr/local
make help | head
cmake -B build -DCMAKE_BUILD_TYPE=Release
cmake --build build -j 4
cmake -S . -B build && cmake --build build && ctest --test-dir build
mkdir -p build && cd build && cmake .. && make
./configure --prefix=/usr/local && make && make check
./gradlew build
./gradlew test --info
./mvnw package
mvn clean install -DskipTests
mvn -q test
gradle build
cargo build
cargo build --release
cargo test
cargo test --workspace --all-features
cargo fmt --all -- --check
cargo clippy --all-targets -- -D warnings
cargo run -- --help
cargo add serde
cargo doc --no-deps --open
rustup update
rustup component add clippy
go build ./...
go test -race ./...
go mod tidy
go vet ./... && go test ./...
go run main.go
go install golang.org/x/tools/gopls@latest
sed -i 's/foo/bar/g' src/app.py
sed -n '10,20p' file.txt
sed -e 's/a/b/' -e '/^$/d' file
sed 's/[[:space:]]*$//' file | sort -u
sed -i.bak "s/version = .*/version = \"1.2\"/" pyproject.toml
sed -E 's/([0-9]+)/<\1>/g' f
sed -i '/^#/d' file
sed -n '/start/,/end/p' file
awk '{print $1}' file
awk -F: '{print $1}' /etc/passwd
awk -F, 'NR>1 {sum += $3} END {print sum}' data.csv
awk '/error|warning/ {print FILENAME": "$0}' build.log
awk -v n=5 'NR<=n' file
ps aux | awk '{print $2}' | head
grep -rn "TODO" src
grep -rn "git" docs | head
grep -rni "rm -rf" . --include='*.sh'
grep -v '^#' config | grep -v '^$'
grep -E 'curl|wget' Dockerfile
grep -oP '(?<=version = ")[^"]+' pyproject.toml
grep -c . file
rg -n "push" src | head -20
rg --files -g '*.py' | wc -l
find . -name '*.py'
find . -name '*.py' | xargs grep -l import
find . -type f -name '*.pyc' -delete
find . -type d -name __pycache__ -exec rm -r {} +
find src -name '*.ts' -not -path '*/node_modules/*' | wc -l
find . -name '*.sh' -exec chmod +x {} \;
find . -type f -exec grep -l "git push" {} +
find . -type f -size +10M -print0 | xargs -0 ls -lh
tar xzf archive.tar.gz
tar -czf backup.tar.gz src docs
tar -xJf linux.tar.xz -C /tmp --strip-components=1
tar tf archive.tar | head
tar -xvf rm-tool.tar
unzip -o archive.zip -d out
zip -r out.zip dist
gzip -k file
curl -fsSL https://example.org/data.json -o data.json
curl -s https://api.github.com/repos/psf/requests | jq .stargazers_count
curl -I https://example.org
curl -X POST -H 'Content-Type: application/json' -d '{"a": 1}' http://localhost:8000/api
curl http://localhost:8000/health && echo ok
wget -q https://example.org/file.tar.gz
wget -qO- https://example.org/list.txt | head
apt-get update
apt-get install -y git
apt-get update && apt-get install -y git curl build-essential
sudo apt-get update && sudo apt-get install -y curl
sudo apt install git
apt list --installed | grep git
apk add --no-cache git curl
brew install git
brew install curl wget
yum install -y git
dnf install git
pacman -S git
which curl
which git && git --version
command -v curl >/dev/null 2>&1 || echo "curl is missing"
type rm
man git
git help push
git push --help
rm -rf build
rm -f *.pyc
rm -rf node_modules && npm ci
rm old.txt; touch new.txt
cp -r src dst && rm -r src
mkdir -p out && cp *.md out/
mv a.txt b.txt
ls -la | grep '\.py$'
ls -1 *.md
cat README.md
cat /etc/os-release | grep VERSION
cat file1 file2 > all.txt
head -n 50 log.txt
tail -f log.txt
wc -l $(find . -name '*.py')
sort file.txt | uniq -c | sort -rn | head
cut -d: -f1 /etc/passwd
tr 'a-z' 'A-Z' < file
tee -a log.txt < input
diff -u a.txt b.txt
diff <(sort a) <(sort b)
echo "hello" > hello.txt
echo "do not git push" >> notes.txt
echo $HOME
echo "$PATH" | tr ':' '\n'
printf '%s\n' a b c
cd /tmp && ls
pwd && ls
env | grep PATH
export FOO=bar; echo $FOO
date +%Y-%m-%d
date +%s
sleep 5
sleep 2 && curl -s localhost:8000
ps aux | grep node
kill -9 1234
kill $(lsof -t -i:3000)
lsof -i :8000
df -h
du -sh * | sort -h
chmod +x script.sh && ./script.sh
chmod 644 file
ln -s a b
touch file.txt
for i in 1 2 3; do echo $i; done
for f in *.py; do python -m py_compile "$f"; done
while read -r line; do echo "$line"; done < file.txt
if [ -f .env ]; then cat .env; fi
[ -d node_modules ] || npm install
test -f setup.py && python setup.py --version
timeout 60 pytest -x
timeout 30 npm start || true
time make
nohup python server.py > server.log 2>&1 &
python server.py & sleep 2; curl -s localhost:8000; kill %1
(cd frontend && npm ci && npm run build)
set -e; make; make test
set -euo pipefail && make test
bash scripts/test.sh
bash -c "npm ci && npm test"
sh ./install.sh
bash -n script.sh
shellcheck scripts/*.sh
ssh user@host 'uptime'
scp file.txt user@host:/tmp
rsync -av src/ dst/
psql -c 'select 1'
psql -h localhost -U postgres -c "delete from rm"
sqlite3 db.sqlite 'select * from users'
redis-cli ping
kubectl get pods
kubectl get pods -n git
kubectl apply -f k8s/
kubectl logs -f deploy/web
kubectl exec -it web -- ls
helm upgrade --install app ./chart
terraform init && terraform plan
terraform apply -auto-approve
aws s3 ls s3://bucket
aws s3 rm s3://bucket/key
gcloud auth list
gh pr list
gh pr create --title "Fix git push" --body "See rm"
gh run view 123 --log
gh release download v1.0
java -jar app.jar
javac Main.java && java Main
gcc -O2 -o app main.c
gcc -Wall -o app main.c && ./app
g++ -std=c++20 main.cpp -o main
clang-format -i src/*.c
php artisan migrate
composer install
bundle install
bundle exec rspec
bundle exec rake db:migrate
rake test
ruby script.rb
rails db:migrate
dotnet build
dotnet test
mix test
swift build
flutter test
jq -r '.dependencies | keys[]' package.json
yq '.services' docker-compose.yml
xargs -n1 echo < list.txt
cat list.txt | xargs -I{} mkdir -p {}
ls *.log | xargs rm
less README.md
vim README.md
code .
open index.html
systemctl status nginx
sudo systemctl restart nginx
journalctl -u app -n 100
crontab -l
uname -a
whoami
nproc
openssl rand -hex 32
base64 -d file.b64 > file.bin
md5sum file
sha256sum -c SHA256SUMS
""".strip().split("\n")
SCRIPTS = [
    "git commit -m \"$(cat <<'EOF'\nExplain how to push\n\nThe page names git push and rm.\nEOF\n)\"",
    "python - <<'EOF'\nimport json\nprint(json.dumps({\"a\": 1}))\nEOF",
    "cat > config.ini <<EOF\n[remote]\nurl = https://github.com/a/b.git\nEOF",
    "cat <<EOF > deploy.md\nRun git push and then curl the page, then rm the file.\nEOF",
]
ASKED: dict[tuple[str, ...], dict[str, str]] = {
    ("git", "push"): {
        "docker exec -it web bash": "a shell without a script runs what is typed",
        "git push --help": "it runs git push",
    },
    ("rm",): {
        "docker exec -it web bash": "a shell without a script runs what is typed",
        "find . -type d -name __pycache__ -exec rm -r {} +": "it runs rm",
        "rm -rf build": "it runs rm",
        "rm -f *.pyc": "it runs rm",
        "rm -rf node_modules && npm ci": "it runs rm",
        "rm old.txt; touch new.txt": "it runs rm",
        "cp -r src dst && rm -r src": "it runs rm",
        'psql -h localhost -U postgres -c "delete from rm"': "psql is not known, and may start the program that its words name",
        "ls *.log | xargs rm": "it runs rm",
    },
    ("curl",): {
        "docker exec -it web bash": "a shell without a script runs what is typed",
        "curl -fsSL https://example.org/data.json -o data.json": "it runs curl",
        "curl -s https://api.github.com/repos/psf/requests | jq .stargazers_count": "it runs curl",
        "curl -I https://example.org": "it runs curl",
        "curl -X POST -H 'Content-Type: application/json' -d '{\"a\": 1}' http://localhost:8000/api": "it runs curl",
        "curl http://localhost:8000/health && echo ok": "it runs curl",
        "sleep 2 && curl -s localhost:8000": "it runs curl",
        "python server.py & sleep 2; curl -s localhost:8000; kill %1": "it runs curl",
    },
}
"""The ones that may be asked about or denied, by what a rule denies, each with the reason."""


def check(command: str, *denied: str) -> str:
    policy = Policy([Rule.deny_command(denied), Rule.allow_tool("run_terminal_command")])
    return policy.check(Request(tool=RUNS, input=freeze_object({"command": command}))).decision


@pytest.mark.spec("reliability:PM52")
@pytest.mark.parametrize("denied", ASKED, ids=" ".join)
def test_ordinary_commands_run_unasked_beside_a_deny(denied: tuple[str, ...]) -> None:
    stopped = [command for command in (*LINES, *SCRIPTS) if check(command, *denied) != "allow"]

    assert sorted(ASKED[denied]) == sorted(stopped)


HARMLESS = [
    "git status && git diff", "cd src && git status", "cd x && git stash push", 'grep -rn "git push" docs | head', "echo git push; ls", "cat git | wc -l", "apt-get install git", "git log | cat",
    "python -c 'import re; re.compile(\"a\")'", "git commit -m 'git push' && git log", "./build.sh && git status", "VERSION=git; make", "grep $'\\t' f; git log", "(cd a && git log) | head", "git log $REF | head",
    'git -C "$DIR" status && ls', "make -f rules.mk; git log", "ls 2>&- ; git log", "git log 2>&1 | tee log", "cat <<-E\n\tgit push\n\tE\ngit log", "python manage.py check && git add -A", "echo $((1 + (2 * 3))); git log",
    "case $x in a) git log;; esac", "sh build.sh > log; git add log", "python x.py > out.txt && git diff", "sed 's/a/b/' docs/example.md | sed -e s/a/b/ e.txt", "awk '$1 ~ /a|b/ {print \"x|y\"}' f",
    "sed '/x/a\\\nexport A=1' f", "FOO=$BAR make && git log", "command -v git && git log", "python3 -c 'import ast; ast.literal_eval(x)'", "echo x | jq . && git log", "git log | less +G",
]  # fmt: skip

USUAL = [
    "git diff --name-only | xargs git add", "git branch --merged | xargs git branch -d", "xargs -a files.txt git add", "ls | xargs -I{} git -C {} pull",
    "ls | parallel git add", "awk '{print $1 \"|\" $2}' f", "awk '{if ($1==\"x\" || $2==\"y\") print}' f", "awk '{print $1 / $2 \"|\" $3 # a | b\n}' f",
    "awk '/[0-9]|x/ {print}' f", "python -c \"import importlib.metadata as m; print(m.version('httpx'))\"", "python -c 'import platform; print(platform.system())'",
    "find . -name '*.pyc' -exec rm {} +", "ctest --output-on-failure", "coverage run -m pytest", "hatch run test:cov", "meson test -C build",
    "tox -x testenv.recreate=true", "yarn workspace app test", "pnpm recursive run build", "dotnet test -p:Configuration=Release", "cargo +nightly build",
    "tar cIf zstd a.tar x", "fd -Hx ls", "go test -exec=wine ./...", "sed 's/[/]/x/g;s/[e]/y/' f", "node --import tsx app.js", "perl -MPOSIX -e 'print floor(3.2)'",
    "ls | sudo tee x", "cat f | chroot / wc", "uv run - <<E\nprint(1)\nE", "cat f | unshare -r wc", "git diff | vim -", "cat f | script -qc 'wc -l' out", "echo x | su -c cat y", "ls | linux64 wc",
]  # fmt: skip
"""Uses of programs that can start others."""


@pytest.mark.spec("reliability:PM52")
@pytest.mark.parametrize("command", HARMLESS)
def test_a_script_of_known_commands_is_judged_by_each(command: str) -> None:
    assert "allow" == check(command, "git", "push")


@pytest.mark.spec("reliability:PM52")
@pytest.mark.parametrize("command", USUAL)
def test_programs_that_can_start_others_do_ordinary_work_unasked(command: str) -> None:
    for denied in (("git", "push"), ("rm", "-rf"), ("shutdown",)):
        assert "allow" == check(command, *denied)
