//! `sterna run --restore`: guests of Sterna's own VMM out of images, before and after their memory is loaded.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_drive::Vm;
use sterna_qmp::Endpoint;

pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// A VM that is killed when the test ends.
pub(crate) struct Machine {
    pub(crate) child: Child,
    pub(crate) socket: PathBuf,
    errors: PathBuf,
}

impl Machine {
    pub(crate) fn start(directory: &Path, name: &str, kind: &str, more: &[&str]) -> Self {
        Self::start_with(directory, name, kind, more, &|_| {})
    }

    /// `set` changes the command before it starts.
    pub(crate) fn start_with(
        directory: &Path,
        name: &str,
        kind: &str,
        more: &[&str],
        set: &dyn Fn(&mut Command),
    ) -> Self {
        let (socket, errors) = (directory.join(name), directory.join(format!("{name}.log")));
        let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
        set(&mut command);
        let child = command
            // The checker of the KVM machine takes the fill from the command line.
            .args(["run", "--ram=64M", "--rate=2000", "--fill=half"])
            .arg(format!("--machine={kind}"))
            .arg(format!("--qmp=unix:{}", socket.display()))
            .arg(format!("--exit-with-parent={}", std::process::id()))
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(&errors).unwrap())
            .spawn()
            .unwrap();
        let mut machine = Self { child, socket, errors };
        machine.vm();
        machine
    }

    pub(crate) fn restored(directory: &Path, name: &str, kind: &str, image: &Path, more: &[&str]) -> Self {
        let image = format!("--restore={}", image.display());
        let machine = Self::start(directory, name, kind, &[&[image.as_str()], more].concat());
        machine.until("the guest can run", |restore| restore["start-time"].is_number());
        machine
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.errors).unwrap_or_default()
    }

    fn vm(&mut self) -> Vm {
        let deadline = Instant::now() + LIMIT;
        loop {
            match Vm::connect(&Endpoint::Unix(self.socket.clone())) {
                Ok(vm) => return vm,
                Err(error) => {
                    let ended = self.child.try_wait().unwrap();
                    assert!(ended.is_none() && Instant::now() < deadline, "{error}: {}", self.log());
                }
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn ask(&self, command: &str, arguments: Value) -> Value {
        self.try_ask(command, arguments).unwrap_or_else(|error| panic!("{command}: {error}; {}", self.log()))
    }

    pub(crate) fn try_ask(&self, command: &str, arguments: Value) -> Result<Value, String> {
        let mut vm = Vm::connect(&Endpoint::Unix(self.socket.clone())).map_err(|error| error.to_string())?;
        vm.execute(command, arguments).map_err(|error| error.to_string())
    }

    pub(crate) fn until(&self, what: &str, found: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + LIMIT;
        loop {
            let restore = self.ask("x-sterna-query-restore", Value::Null);
            if found(&restore) {
                return restore;
            }
            assert!(Instant::now() < deadline, "{what}: {restore}; {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn check(&self) {
        let checked = self.ask("x-sterna-check-guest", Value::Null);
        assert_eq!(checked["consistent"], json!(true), "{checked}");
    }

    /// Moves the guest to `target`, which waits.
    pub(crate) fn migrate(&self, address: &str, postcopy: bool, target: &Self) {
        if postcopy {
            let on = json!({"capabilities": [{"capability": "postcopy-ram", "state": true},
                {"capability": "return-path", "state": true}]});
            target.ask("migrate-set-capabilities", on.clone());
            self.ask("migrate-set-capabilities", on);
        }
        target.ask("migrate-incoming", json!({"uri": address}));
        self.ask("migrate", json!({"uri": address}));
        let deadline = Instant::now() + LIMIT;
        let mut has_switched = !postcopy;
        loop {
            let status = self.ask("query-migrate", Value::Null);
            match status["status"].as_str().unwrap_or_default() {
                "completed" => break,
                "failed" => panic!("{status}: {}", self.log()),
                "active" if !has_switched => {
                    // Refused until the first pages are on their way.
                    has_switched = self.try_ask("migrate-start-postcopy", Value::Null).is_ok();
                }
                _ => {}
            }
            assert!(Instant::now() < deadline, "{status}: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Both calls fail if the process has already exited, which is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn sterna(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sterna")).args(arguments).output().unwrap()
}

pub(crate) fn done(output: &Output) {
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The kinds of machines that this host can run.
pub(crate) fn kinds() -> Vec<&'static str> {
    match sterna_cli::host::kvm_usable() {
        Ok(()) => vec!["process", "kvm"],
        Err(why) => {
            crate::protect_devices::skip("the KVM machine of run_restore", why);
            vec!["process"]
        }
    }
}

/// Saves a guest that has run for some time.
pub(crate) fn image(directory: &Path, kind: &str, name: &str) -> PathBuf {
    let source = Machine::start(directory, "source.qmp", kind, &[]);
    let deadline = Instant::now() + LIMIT;
    let written = |guest: &Value| guest["steps"][0].as_u64().unwrap_or(0);
    while written(&source.ask("x-sterna-query-guest", Value::Null)) < 300 {
        assert!(Instant::now() < deadline, "the guest writes nothing");
        std::thread::sleep(Duration::from_millis(10));
    }
    let image = directory.join(name);
    done(&sterna(&["save", source.socket.to_str().unwrap(), image.to_str().unwrap()]));
    image
}

#[test]
fn restored_guest_is_whole_before_and_after_its_memory_is_loaded() {
    for kind in kinds() {
        for name in ["vm.sterna", "vm.img"] {
            let directory = tempfile::tempdir().unwrap();
            let image = image(directory.path(), kind, name);

            let eager = Machine::restored(directory.path(), "eager", kind, &image, &[]);
            assert_eq!(eager.ask("query-status", Value::Null)["status"], "running");
            eager.check();
            drop(eager);

            let lazy = Machine::restored(directory.path(), "lazy", kind, &image, &["--lazy"]);
            assert_eq!(lazy.ask("query-status", Value::Null)["status"], "running");
            lazy.check();
            let complete = lazy.until("memory is complete", |restore| restore["status"] == "completed");
            assert_eq!(complete["missing-pages"], 0, "{complete}");
            let counts = |name: &str| complete[name].as_u64().unwrap();
            assert!(counts("content-pages") > 3000 && counts("zero-pages") > 3000, "{complete}");
            lazy.check();
        }
    }
}

#[test]
fn guest_that_lacks_pages_migrates_with_all_of_its_memory() {
    for kind in kinds() {
        let directory = tempfile::tempdir().unwrap();
        let image = image(directory.path(), kind, "vm.sterna");
        for postcopy in [false, true] {
            let options = ["--lazy", "--fill-rate=off"];
            let lazy = Machine::restored(directory.path(), "lazy", kind, &image, &options);
            let target = Machine::start(directory.path(), "target", kind, &["--incoming=defer"]);

            let uri = format!("unix:{}", directory.path().join("m").display());
            lazy.migrate(&uri, postcopy, &target);

            let deadline = Instant::now() + LIMIT;
            while target.ask("query-migrate", Value::Null)["status"] != "completed" {
                assert!(Instant::now() < deadline, "{}", target.log());
                std::thread::sleep(Duration::from_millis(10));
            }
            target.check();
        }
    }
}

#[test]
fn save_of_a_guest_that_lacks_pages_has_all_of_them() {
    for kind in kinds() {
        let directory = tempfile::tempdir().unwrap();
        let first = image(directory.path(), kind, "vm.sterna");
        for name in ["again.sterna", "again.img"] {
            let options = ["--lazy", "--fill-rate=off", "-S"];
            let lazy = Machine::restored(directory.path(), "lazy", kind, &first, &options);
            let before = lazy.until("pages are missing", |restore| restore["status"] == "active");
            assert!(before["missing-pages"].as_u64().unwrap() > 1000, "{before}");

            let second = directory.path().join(name);
            done(&sterna(&["save", lazy.socket.to_str().unwrap(), second.to_str().unwrap()]));

            let compared = sterna(&["diff", first.to_str().unwrap(), second.to_str().unwrap(), "--json"]);
            let differences: Value = serde_json::from_slice(&compared.stdout).unwrap();
            assert_eq!(differences["difference"]["blocks"], json!([]), "{differences}");
        }
    }
}

/// Damages the frames of pages, which are in the middle of the file: none of them has its digest any more.
pub(crate) fn damage(image: &Path) {
    let length = fs::metadata(image).unwrap().len();
    let file = fs::OpenOptions::new().write(true).open(image).unwrap();
    for at in (length / 4..length * 3 / 4).step_by(4096) {
        file.write_all_at(&[0xa5; 64], at).unwrap();
    }
}

#[test]
fn guest_whose_page_is_damaged_is_stopped_and_the_page_and_frame_are_named() {
    for kind in kinds() {
        let directory = tempfile::tempdir().unwrap();
        let image = image(directory.path(), kind, "vm.sterna");
        damage(&image);

        let mut lazy =
            Machine::restored(directory.path(), "lazy", kind, &image, &["--lazy", "--fill-rate=off"]);

        let failed = lazy.until("the guest is stopped", |restore| restore["status"] == "failed");
        let error = failed["error"].as_str().unwrap();
        for word in ["vm.sterna", "frame ", "page at byte", "take another copy"] {
            assert!(error.contains(word), "{error}");
        }
        let deadline = Instant::now() + LIMIT;
        while lazy.ask("query-status", Value::Null)["running"] != json!(false) {
            assert!(Instant::now() < deadline, "the guest runs on");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(lazy.try_ask("cont", Value::Null).unwrap_err().contains("frame "));
        assert!(lazy.log().contains("frame "), "{}", lazy.log());
        lazy.ask("quit", Value::Null);
        assert_eq!(ended(&mut lazy.child), Some(1));
    }
}

#[test]
fn vm_that_lacks_pages_pauses_continues_and_ends() {
    for kind in kinds() {
        let directory = tempfile::tempdir().unwrap();
        let image = image(directory.path(), kind, "vm.sterna");
        let recorded = directory.path().join("touched");
        let record = format!("--record={}", recorded.display());
        let mut lazy = Machine::restored(directory.path(), "lazy", kind, &image, &["--lazy", &record]);

        for _ in 0..3 {
            lazy.ask("stop", Value::Null);
            assert_eq!(lazy.ask("query-status", Value::Null)["running"], json!(false));
            lazy.ask("cont", Value::Null);
            lazy.check();
        }
        lazy.ask("quit", Value::Null);
        assert_eq!(ended(&mut lazy.child), Some(0), "{}", lazy.log());

        let first = format!("--restore-first={}", recorded.display());
        // The same image in a store.
        let stored = format!("store:{}#vm", directory.path().join("store").display());
        done(&sterna(&["convert", image.to_str().unwrap(), &stored]));
        let again = Machine::restored(
            directory.path(),
            "again",
            kind,
            Path::new(&stored),
            &["--lazy", "--fill-rate=max", &first],
        );
        again.until("memory is complete", |restore| restore["status"] == "completed");
        again.check();
    }
}

#[test]
fn what_cannot_be_restored_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let image = image(directory.path(), "process", "vm.sterna");
    let run = |more: &[&str]| {
        let restore = format!("--restore={}", image.display());
        let all = [&["run", "--machine=process", restore.as_str()], more].concat();
        let output = sterna(&all);
        (output.status.code(), text(&output.stderr))
    };

    let (status, error) = run(&["--ram=128M", "--lazy"]);
    assert_eq!(status, Some(2), "{error}");
    assert!(error.contains("RAM block") && error.contains("--ram 64"), "{error}");
    let (status, error) = run(&["--ram=128M"]);
    assert_eq!(status, Some(1), "{error}");
    assert!(error.contains("cannot be loaded"), "{error}");
    let (status, error) = run(&["--ram=64M", "--lazy", "--backing=huge1g"]);
    assert_eq!(status, Some(2), "{error}");
    assert!(error.contains("at most 2 MiB") && error.contains("huge2m"), "{error}");
    let (status, error) = run(&["--ram=64M", "--incoming=defer"]);
    assert_eq!(status, Some(2), "{error}");
}

/// The exit status, when the process has ended.
pub(crate) fn ended(child: &mut Child) -> Option<i32> {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        assert!(Instant::now() < deadline, "the VM does not end");
        std::thread::sleep(Duration::from_millis(10));
    }
}
