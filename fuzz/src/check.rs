//! Runs a fixed number of inputs of a target. The inputs are the same on every machine and every day.
//!
//! A child process runs the inputs in order: first the stored inputs, then the mutated ones. Before each input,
//! the child writes its number into memory that it shares with the parent. The parent therefore knows the input
//! whatever ends the child: a panic, an abort, a signal, the memory limit, or the parent itself after a time
//! limit. The parent then generates the input again and writes it to a file.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;
use rustix::process::{Resource, Rlimit};

use crate::targets::Target;
use crate::{corpus, mutate};

/// Limit of a child's data segment, in bytes.
const MOST_MEMORY: u64 = 1 << 30;
/// Minimum time that a child may take until its first input. It reads all stored inputs first.
const BEGINNING: Duration = Duration::from_secs(300);
/// Interval at which the parent reads the child's progress.
const PAUSE: Duration = Duration::from_millis(20);

/// Selects the inputs, and the directory for inputs that fail.
#[derive(Debug, Clone)]
pub struct Options {
    /// Seed from which mutated inputs are drawn.
    pub seed: u64,
    /// Number of mutated inputs. `None`: the target's own number.
    pub count: Option<u64>,
    /// Directory of more inputs to start with; it has a directory for each target.
    pub seeds: Option<PathBuf>,
    /// Directory to which inputs that fail are written; it has a directory for each target.
    pub artifacts: PathBuf,
    /// Time limit of one input. It is generous, because it only has to detect endless loops.
    pub limit: Duration,
}

/// Numbers of inputs that passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Passed {
    /// Number of stored inputs and seeds.
    pub stored: u64,
    /// Number of mutated inputs.
    pub mutated: u64,
}

/// Inputs of a target. Numbers `0..stored.len()` are the stored inputs; the mutated ones follow.
struct Inputs<'a> {
    target: &'a Target,
    stored: Vec<Vec<u8>>,
    mutated: u64,
    seed: u64,
}

impl<'a> Inputs<'a> {
    fn of(target: &'a Target, options: &Options) -> io::Result<Self> {
        let stored = corpus::all(target.name, options.seeds.as_deref())?;
        if let Some(long) = stored.iter().find(|input| input.len() > target.longest) {
            let (name, bytes, longest) = (target.name, long.len(), target.longest);
            return Err(io::Error::other(format!(
                "a stored input of {name} has {bytes} bytes, and no more than {longest} are taken (fuzz/src/targets/mod.rs)"
            )));
        }
        Ok(Self { target, stored, mutated: options.count.unwrap_or(target.inputs), seed: options.seed })
    }

    fn get(&self, at: u64) -> Vec<u8> {
        match self.stored.get(at as usize) {
            Some(input) => input.clone(),
            None => {
                let number = at - self.stored.len() as u64;
                mutate::input(&self.stored, self.seed, number, self.target.longest)
            }
        }
    }

    /// Name of an input in messages, and its file name.
    fn name(&self, at: u64) -> (String, String) {
        match at.checked_sub(self.stored.len() as u64) {
            Some(number) => (
                format!("input {number} of seed {}", self.seed),
                format!("seed-{}-input-{number}", self.seed),
            ),
            None => (format!("stored input {at}"), format!("stored-{at}")),
        }
    }
}

/// Runs the inputs of `target` in a child process: this program with `arguments`, which must call [`child`].
///
/// # Errors
/// The bug that was found, with the input's name, its file and the command that runs it again. Or the reason
/// why no input could be run.
pub fn run(target: &Target, options: &Options, arguments: &[OsString]) -> Result<Passed, String> {
    let failed = |error: io::Error| format!("{}: {error}", target.name);
    let inputs = Inputs::of(target, options).map_err(failed)?;
    let progress: File = rustix::fs::memfd_create("progress", MemfdFlags::CLOEXEC)
        .map_err(|error| failed(error.into()))?
        .into();
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    let mut child =
        command.args(arguments).stdin(progress.try_clone().map_err(failed)?).spawn().map_err(failed)?;
    let ended = watch(&mut child, &progress, options.limit).map_err(failed)?;
    let stored = inputs.stored.len() as u64;
    if ended.status.success() {
        return Ok(Passed { stored, mutated: inputs.mutated });
    }
    let Some(at) = ended.at else {
        return Err(format!("{}: the child ended with {} before the first input", target.name, ended.status));
    };
    let (words, file) = inputs.name(at);
    let directory = options.artifacts.join(target.name);
    let path = directory.join(file);
    fs::create_dir_all(&directory).and_then(|()| fs::write(&path, inputs.get(at))).map_err(failed)?;
    let how = match ended.is_stuck {
        true => format!("took more than {} s", options.limit.as_secs()),
        false => format!("ended with {}", ended.status),
    };
    Err(format!(
        "{} found a bug: {words} {how}. The input lies in {}; again: cargo run -p sterna-fuzz -- replay {} {}",
        target.name,
        path.display(),
        target.name,
        path.display()
    ))
}

struct Ended {
    status: ExitStatus,
    /// Number of the last input that the child started.
    at: Option<u64>,
    is_stuck: bool,
}

/// Waits for the child, and kills it if one input takes longer than `limit`.
fn watch(child: &mut Child, progress: &File, limit: Duration) -> io::Result<Ended> {
    let mut last = (None, Instant::now());
    loop {
        let limit = if last.0.is_none() { limit.max(BEGINNING) } else { limit };
        let exited = child.try_wait()?;
        let at = read_progress(progress)?;
        if let Some(status) = exited {
            return Ok(Ended { status, at, is_stuck: false });
        }
        if at != last.0 {
            last = (at, Instant::now());
        } else if last.1.elapsed() > limit {
            child.kill()?;
            return Ok(Ended { status: child.wait()?, at, is_stuck: true });
        }
        std::thread::sleep(PAUSE);
    }
}

fn read_progress(progress: &File) -> io::Result<Option<u64>> {
    let mut bytes = [0; 8];
    let read = progress.read_at(&mut bytes, 0)?;
    Ok((read == 8).then(|| u64::from_le_bytes(bytes)))
}

/// The child's side of [`run`]: runs all inputs. Standard input is the file to which it writes the current
/// input's number.
///
/// # Errors
/// An error of the operating system. A bug in the target ends the process instead.
pub fn child(target: &Target, options: &Options) -> io::Result<()> {
    use std::os::fd::AsFd;
    let inputs = Inputs::of(target, options)?;
    let progress = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    alone()?;
    for at in 0..inputs.stored.len() as u64 + inputs.mutated {
        let input = inputs.get(at);
        progress.write_all_at(&at.to_le_bytes(), 0)?;
        (target.run)(&input);
    }
    Ok(())
}

/// Runs single inputs from files, under the same limits as a child.
///
/// # Errors
/// An error of the operating system.
pub fn replay(target: &Target, files: &[PathBuf]) -> io::Result<()> {
    alone()?;
    for file in files {
        let input = fs::read(file)?;
        (target.run)(&input);
    }
    Ok(())
}

/// Makes a panic in any thread abort this process, and limits its memory.
fn alone() -> io::Result<()> {
    let say = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        say(panic);
        std::process::abort();
    }));
    let limit = Rlimit { current: Some(MOST_MEMORY), maximum: Some(MOST_MEMORY) };
    Ok(rustix::process::setrlimit(Resource::Data, limit)?)
}
