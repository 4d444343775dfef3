//! Ctrl-C while a command asks its VM, before the operation begins. Each moment is tried: the signal arrives after
//! the first question, after the second, and so on.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::save::Process;

const STERNA: &str = env!("CARGO_BIN_EXE_sterna");

/// A monitor between a command and a VM. It asks the test before it passes a question on.
struct Between {
    at: PathBuf,
    questions: Receiver<String>,
    /// Each word passes one question on.
    pass: Sender<()>,
}

impl Between {
    fn new(at: PathBuf, vm: &Path) -> Self {
        let (listener, vm) = (UnixListener::bind(&at).unwrap(), UnixStream::connect(vm).unwrap());
        let ((tell, questions), (pass, may_pass)) = (channel(), channel());
        std::thread::spawn(move || {
            let (command, _) = listener.accept().unwrap();
            let (mut answers, mut back) = (vm.try_clone().unwrap(), command.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut answers, &mut back));
            for line in BufReader::new(command).lines().map_while(Result::ok) {
                let question: Value = serde_json::from_str(&line).unwrap();
                tell.send(question["execute"].as_str().unwrap().to_owned()).unwrap();
                if may_pass.recv().is_err() || writeln!(&vm, "{line}").is_err() {
                    return;
                }
            }
        });
        Self { at, questions, pass }
    }

    /// Interrupts `command` while it waits for the answer to question `moment`. Returns its output and the later
    /// questions; none: it asks fewer questions until it asks `begins`.
    fn interrupt(&self, command: Child, moment: usize, begins: &str) -> Option<(Output, Vec<String>)> {
        let mut later = Vec::new();
        for number in 0.. {
            let Ok(question) = self.questions.recv() else { break };
            if question == begins && number <= moment {
                self.pass.send(()).unwrap();
                kill_process(Pid::from_child(&command), Signal::INT).unwrap();
                while self.questions.recv().is_ok() && self.pass.send(()).is_ok() {}
                command.wait_with_output().unwrap();
                return None;
            }
            if number == moment {
                kill_process(Pid::from_child(&command), Signal::INT).unwrap();
                wait_until_handled(&command);
            } else if number > moment {
                later.push(question);
            }
            self.pass.send(()).unwrap();
        }
        Some((command.wait_with_output().unwrap(), later))
    }
}

/// Waits until the process has received the signal, and gives its thread time to count it.
fn wait_until_handled(child: &Child) {
    let status = format!("/proc/{}/status", child.id());
    let pending = |line: &str| line.starts_with("ShdPnd:") && line.trim_end().ends_with("0000");
    while !std::fs::read_to_string(&status).unwrap().lines().any(pending) {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(30));
}

#[test]
fn migration_is_cancelled_by_ctrl_c_at_every_question_before_it_begins() {
    let directory = tempfile::tempdir().unwrap();
    // This guest writes faster than the migration sends, so only Ctrl-C ends it.
    let vm = Process::start(directory.path().join("vm"), &[]);
    let mut moments = 0;
    for moment in 0.. {
        let between =
            Between::new(directory.path().join(format!("between{moment}")), &directory.path().join("vm"));
        let target = format!("unix:{}", directory.path().join("nobody").display());
        let _nobody = UnixListener::bind(directory.path().join("nobody"));
        let at = format!("unix:{}", between.at.display());
        let line = ["migrate", &at, &target, "--set", "max-bandwidth=1M"];
        let mut command = Command::new(STERNA);
        let command = command.args(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();

        let Some((output, later)) = between.interrupt(command, moment, "migrate") else { break };

        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(130), "question {moment}: {said}");
        assert!(!later.iter().any(|question| question == "migrate"), "question {moment}: {later:?}");
        assert_eq!(vm.vm().run_state().unwrap(), "running", "question {moment}");
        let parameters = vm.vm().execute("query-migrate-parameters", json!({})).unwrap();
        assert_ne!(parameters["max-bandwidth"], 1 << 20, "question {moment}: the setting was put back");
        moments += 1;
    }
    assert!(moments > 4, "only {moments} questions");
}
