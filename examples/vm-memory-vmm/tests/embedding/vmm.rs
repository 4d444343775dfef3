//! A VMM process with its control socket.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Longest wait for any event; far longer than necessary on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

pub struct Vmm {
    name: String,
    child: Child,
    control: BufReader<UnixStream>,
    lines: Arc<Mutex<Vec<String>>>,
    reader: Option<JoinHandle<()>>,
}

impl Vmm {
    /// Starts the VMM and waits until its control socket exists. A destination listens by then.
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

    /// Sends a command and returns the answer line.
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

    /// The answer without its newline.
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

    /// Waits until the status contains `text`.
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

    /// The numbers that the guest has printed in this process.
    pub fn numbers(&self) -> Vec<u32> {
        let lines = self.lines.lock().unwrap();
        lines.iter().filter_map(|line| line.strip_prefix("guest: ")?.parse().ok()).collect()
    }

    /// All numbers of a stopped guest. Waits for the last line, which may still be in the pipe.
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

    /// Waits until the guest has printed `count` numbers.
    #[track_caller]
    pub fn wait_for_numbers(&mut self, count: usize) {
        let until = Instant::now() + PATIENCE;
        while self.numbers().len() < count {
            assert!(self.child.try_wait().unwrap().is_none(), "{} ended: {:?}", self.name, self.lines);
            assert!(Instant::now() < until, "{}: the guest does not count: {:?}", self.name, self.lines);
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends the VMM. After the return [`Vmm::numbers`] is complete.
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
