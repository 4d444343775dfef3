//! A process that speaks Firecracker's side of the page-fault protocol (specs/uffd.md), with a real userfaultfd.
//!
//! A program starts itself a second time with [`Peer::start`]. The second process calls [`child`], which maps memory,
//! registers it, hands it over, touches it and removes it, as the first one says.
//!
//! [`cloud_hypervisor`] is the other VMM of the tests.

use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

mod child;
pub mod cloud_hypervisor;
mod memory;

pub use child::child;

/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// A guest's VMM in another process. It is killed when this value is dropped.
#[derive(Debug)]
pub struct Peer {
    process: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

/// Adds a word to a checksum.
pub fn mix(sum: u64, word: u64) -> u64 {
    (sum.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The checksum of bytes, as [`Peer::sum`] returns it.
pub fn sum(bytes: &[u8]) -> u64 {
    let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
    words.fold(0, mix)
}

/// Memory with content in most pages: every fifth page is zero, and pages differ.
pub fn memory(bytes: u64) -> Vec<u8> {
    let mut memory = vec![0; bytes as usize];
    for (page, content) in memory.chunks_exact_mut(PAGE as usize).enumerate() {
        if page % 5 != 3 {
            for (index, word) in content.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                *word = mix(page as u64 + 1, index as u64).to_le_bytes();
            }
        }
    }
    memory
}

impl Peer {
    /// Starts the process.
    ///
    /// # Errors
    /// The error of the start.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (commands, answers) = (process.stdin.take(), process.stdout.take());
        let (Some(commands), Some(answers)) = (commands, answers) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        Ok(Self { process, commands, answers: BufReader::new(answers) })
    }

    /// Maps regions of these lengths and registers them with a userfaultfd. `page_bytes` is only said.
    ///
    /// # Errors
    /// Why the kernel refuses.
    pub fn map(&mut self, page_bytes: u64, regions: &[u64]) -> Result<(), String> {
        self.map_of("small", page_bytes, regions)
    }

    /// As [`map`](Self::map), in huge pages.
    ///
    /// # Errors
    /// Why the kernel refuses.
    pub fn map_huge(&mut self, regions: &[u64]) -> Result<(), String> {
        self.map_of("huge", 2 << 20, regions)
    }

    fn map_of(&mut self, kind: &str, page_bytes: u64, regions: &[u64]) -> Result<(), String> {
        let regions: Vec<String> = regions.iter().map(u64::to_string).collect();
        self.ask(&format!("map {page_bytes} {kind} {}", regions.join(" "))).map(drop)
    }

    /// Connects to the socket and sends the message. `how` names a right or wrong way.
    ///
    /// # Errors
    /// The error of the socket.
    pub fn hand_over(&mut self, socket: &Path, how: &str) -> Result<(), String> {
        self.ask(&format!("connect {}", socket.display()))?;
        self.ask(&format!("send {how}")).map(drop)
    }

    /// The checksum of these bytes of the memory.
    ///
    /// # Errors
    /// The process has ended.
    pub fn sum(&mut self, from: u64, bytes: u64) -> Result<u64, String> {
        let answer = self.ask(&format!("sum {from} {bytes}"))?;
        answer.parse().map_err(|_| answer)
    }

    /// Gives these bytes back to the kernel.
    ///
    /// # Errors
    /// The error of `madvise`, or the process has ended.
    pub fn remove(&mut self, from: u64, bytes: u64) -> Result<(), String> {
        self.ask(&format!("remove {from} {bytes}")).map(drop)
    }

    /// Sends a command, and waits for the answer.
    ///
    /// # Errors
    /// The process's error, or that it has ended.
    pub fn ask(&mut self, command: &str) -> Result<String, String> {
        self.tell(command)?;
        self.answer()
    }

    /// Sends a command without waiting for its answer.
    ///
    /// # Errors
    /// The process has ended.
    pub fn tell(&mut self, command: &str) -> Result<(), String> {
        writeln!(self.commands, "{command}").map_err(|error| error.to_string())
    }

    /// Waits for the answer to a command.
    ///
    /// # Errors
    /// The process's error, or that it has ended.
    pub fn answer(&mut self) -> Result<String, String> {
        loop {
            let mut line = String::new();
            let count = self.answers.read_line(&mut line).map_err(|error| error.to_string())?;
            if count == 0 {
                return Err("the process has ended".to_owned());
            }
            // A test's harness prints lines of its own, and may begin the line.
            let Some((_, answer)) = line.trim_end().split_once(child::ANSWER) else { continue };
            return match answer.strip_prefix("failed ") {
                Some(why) => Err(why.to_owned()),
                None => Ok(answer.to_owned()),
            };
        }
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Waits for the end of a process that another one kills.
    ///
    /// # Errors
    /// The error of the wait.
    pub fn wait(&mut self) -> io::Result<ExitStatus> {
        self.process.wait()
    }

    /// Kills the process.
    pub fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.kill();
    }
}
