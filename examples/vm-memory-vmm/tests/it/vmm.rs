//! A VMM in a process of its own, and its control socket.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Far longer than anything takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

pub struct Vmm {
    name: String,
    child: Child,
    control: BufReader<UnixStream>,
    lines: Arc<Mutex<Vec<String>>>,
    reader: Option<JoinHandle<()>>,
}

impl Vmm {
    /// Returns when its control socket is there, so when a destination listens.
    pub fn start(home: &Path, name: &str, arguments: &[&str]) -> Self {
        let socket = home.join(format!("{name}.control"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_vm-memory-vmm"));
        command.arg("--control").arg(&socket).args(arguments).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = Arc::new(Mutex::new(Vec::new()));
        let (output, to) = (child.stdout.take().unwrap(), lines.clone());
        let read = move || {
            BufReader::new(output)
                .lines()
                .map_while(Result::ok)
                .for_each(|line| to.lock().unwrap().push(line));
        };
        let reader = Some(thread::spawn(read));
        let control = connect(&socket, &mut child);
        Self { name: name.to_owned(), child, control: BufReader::new(control), lines, reader }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The answer to a command.
    fn send(&mut self, command: &str, argument: &str) -> String {
        writeln!(self.control.get_mut(), "{command} {argument}").unwrap();
        let mut answer = String::new();
        self.control.read_line(&mut answer).unwrap();
        answer
    }

    #[track_caller]
    pub fn ask(&mut self, command: &str, argument: &str) {
        let answer = self.send(command, argument);
        assert!(answer.starts_with("ok"), "{} {command}: {answer}", self.name);
    }

    /// The answer, without its end of line.
    pub fn answer(&mut self, command: &str, argument: &str) -> String {
        self.send(command, argument).trim_end().to_owned()
    }

    #[track_caller]
    pub fn refusal(&mut self, command: &str, argument: &str) -> String {
        let answer = self.send(command, argument);
        assert!(answer.starts_with("error: "), "{} {command}: {answer}", self.name);
        answer
    }

    pub fn status(&mut self) -> String {
        self.send("status", "")
    }

    /// Returns when the status contains `text`.
    #[track_caller]
    pub fn wait_for(&mut self, text: &str) {
        let until = Instant::now() + PATIENCE;
        loop {
            let status = self.status();
            if status.contains(text) {
                return;
            }
            assert!(Instant::now() < until, "{}: no {text}: {status} {:?}", self.name, self.lines);
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// What the guest has printed here.
    pub fn numbers(&self) -> Vec<u32> {
        let lines = self.lines.lock().unwrap();
        lines.iter().filter_map(|line| line.strip_prefix("guest: ")?.parse().ok()).collect()
    }

    /// All that it has printed here: the last line may be on its way still.
    #[track_caller]
    pub fn all_numbers_of_stopped_guest(&mut self) -> Vec<u32> {
        let status = self.status();
        let (_, last) = status.trim_end().rsplit_once("printed ").unwrap();
        let until = Instant::now() + PATIENCE;
        while self.numbers().last().copied() != last.parse().ok() {
            assert!(Instant::now() < until, "{}: {status} {:?}", self.name, self.lines);
            thread::sleep(Duration::from_millis(5));
        }
        self.numbers()
    }

    /// Returns when the guest has printed that many.
    #[track_caller]
    pub fn wait_for_numbers(&mut self, count: usize) {
        let until = Instant::now() + PATIENCE;
        while self.numbers().len() < count {
            assert!(self.child.try_wait().unwrap().is_none(), "{} ended: {:?}", self.name, self.lines);
            assert!(Instant::now() < until, "{}: the guest does not count: {:?}", self.name, self.lines);
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends it. All that the guest printed is in [`Vmm::numbers`] then.
    #[track_caller]
    pub fn quit(&mut self) {
        self.ask("quit", "");
        assert!(self.child.wait().unwrap().success(), "{}: {:?}", self.name, self.lines);
        self.reader.take().unwrap().join().unwrap();
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn connect(socket: &PathBuf, child: &mut Child) -> UnixStream {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Ok(stream) = UnixStream::connect(socket) {
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            return stream;
        }
        assert!(child.try_wait().unwrap().is_none(), "the VMM ended");
        assert!(Instant::now() < until, "no control socket");
        thread::sleep(Duration::from_millis(5));
    }
}

pub fn kvm_or_skip(test: &str) -> bool {
    let kvm = std::fs::File::options().read(true).write(true).open("/dev/kvm");
    kvm.inspect_err(|error| eprintln!("SKIPPED {test}: /dev/kvm: {error}")).is_ok()
}
