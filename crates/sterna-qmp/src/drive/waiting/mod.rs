//! A QEMU that waits for the guest of a standby: its RAM is a file that the standby fills, and only devices have to be loaded.
//!
//! The command line names the file: `-object memory-backend-file,id=ID,mem-path=DIR/FILE,share=on,size=…` and `-machine
//! …,memory-backend=ID`. The standby makes the file when the guest's blocks are known, and keeps the block ID there, checkpoint by
//! checkpoint. QEMU is started with `-incoming defer` when the guest has come, and touches nothing. When the guest is taken
//! over, it gets the devices and the blocks that are in no file through a pipe (capability `x-ignore-shared`), with the guest
//! paused; what can fail has been done then. It runs the guest by `cont`, and only then takes its disks (`late-block-activate`).

mod line;
mod load;

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use sterna::error::VmError;
use sterna::replica::{HeldGuest, Survivor};

use super::restore::launch::Launched;
use super::{Changed, DriveError, Progress, Vm, Watch, Wish};
pub use line::RamFile;

/// A VM that waits, or will.
pub struct WaitingVm {
    command: Vec<OsString>,
    files: Vec<RamFile>,
    /// For monitors and what the VM says.
    directory: PathBuf,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Names and lengths of the guest's blocks.
    blocks: Vec<(String, u64)>,
    /// Whether the block lies in a file.
    is_in_file: Vec<bool>,
    /// Files that were made here.
    made: Vec<PathBuf>,
    vm: Option<Running>,
    launches: u32,
    progress: Stage,
}

struct Running {
    launched: Launched,
    vm: Vm,
    /// What was set for loading.
    changed: Changed,
}

/// How far the VM has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Stage {
    #[default]
    None,
    /// It waits.
    Waits,
    /// The guest is loaded, and paused.
    Loaded,
    /// It was told to run the guest, and has not answered: its RAM is no checkpoint any more.
    Unknown,
    Runs,
}

/// The process that runs the guest.
#[derive(Debug, Clone)]
pub struct Survived {
    /// Its id.
    pub process: u32,
    /// Its monitor.
    pub monitor: PathBuf,
    /// What it says.
    pub log: PathBuf,
}

impl WaitingVm {
    /// A VM of that command, whose shared memory lies below `ram`. `directory`, which exists, is for monitors; it stays if the VM
    /// lives on. `replaces`: whether a file of an earlier standby is removed.
    ///
    /// # Errors
    /// [`DriveError::Request`]: the command cannot be used, or a file is there already.
    pub fn new(
        command: &[OsString],
        ram: &Path,
        directory: &Path,
        replaces: bool,
    ) -> Result<Self, DriveError> {
        let command = line::without_incoming(command)?;
        let files = line::ram_files(&command, ram)?;
        for RamFile { path, .. } in files.iter().filter(|file| file.path.exists()) {
            if !replaces {
                return Err(DriveError::Request(format!(
                    "{} exists: it may be the memory of a guest that runs. If no VM uses it, remove it, or use --force",
                    path.display()
                )));
            }
            // A VM that uses it keeps it.
            std::fs::remove_file(path).map_err(|error| DriveError::file("remove", path, error))?;
        }
        Ok(Self { command, files, directory: directory.to_owned(), state: Mutex::default() })
    }

    /// Starts the VM, unless it waits already. Before the guest has come this does nothing.
    ///
    /// # Errors
    /// It does not come up, or is another machine than the guest's.
    pub fn launch(&self) -> Result<(), DriveError> {
        let mut state = self.state.lock();
        if state.blocks.is_empty() || state.progress != Stage::None {
            return Ok(());
        }
        self.launch_anew(&mut state)
    }

    fn launch_anew(&self, state: &mut State) -> Result<(), DriveError> {
        (state.vm, state.progress) = (None, Stage::None);
        state.launches += 1;
        let directory = self.directory.join(state.launches.to_string());
        std::fs::create_dir(&directory).map_err(|error| DriveError::file("create", &directory, error))?;
        let mut launched = Launched::start(&self.command, &directory)?;
        let checked = launched.vm(&mut Silent).and_then(|mut vm| {
            load::check(&mut vm, &state.blocks)?;
            Ok(vm)
        });
        let vm = checked.map_err(|error| said(error, &launched))?;
        state.vm = Some(Running { launched, vm, changed: Changed::default() });
        state.progress = Stage::Waits;
        Ok(())
    }

    /// How it stands, in words.
    pub fn status(&self) -> String {
        // Whoever has it starts or loads it.
        let Some(mut state) = self.state.try_lock() else { return "at work".to_owned() };
        let is_dead = state.vm.as_mut().is_some_and(|running| running.launched.has_ended());
        match state.progress {
            _ if is_dead => "has ended".to_owned(),
            Stage::None => "not started".to_owned(),
            Stage::Waits => "waits".to_owned(),
            Stage::Loaded => "loaded".to_owned(),
            Stage::Unknown => "unknown".to_owned(),
            Stage::Runs => "runs the guest".to_owned(),
        }
    }

    /// The VM that runs the guest lives on without this process.
    pub fn release(&self) -> Option<Survived> {
        let mut state = self.state.lock();
        let runs = state.progress == Stage::Runs;
        let Running { launched, .. } = state.vm.take_if(|_| runs)?;
        let survived = Survived { process: launched.id(), monitor: launched.socket(), log: launched.log() };
        launched.release();
        state.made.clear();
        Some(survived)
    }

    /// Ends the VM before the guest goes on otherwise.
    ///
    /// # Errors
    /// The guest may have run there, so what is in its RAM is no checkpoint.
    pub fn give_up(&self) -> Result<(), VmError> {
        let mut state = self.state.lock();
        if matches!(state.progress, Stage::Unknown | Stage::Runs) {
            return Err(tainted());
        }
        (state.vm, state.progress) = (None, Stage::None);
        Ok(())
    }

    /// Files with the guest's memory that were made here.
    pub fn files(&self) -> Vec<PathBuf> {
        self.state.lock().made.clone()
    }

    fn error(error: &DriveError) -> VmError {
        VmError::new(
            "the VM that waits",
            format!(
                "{error}. The checkpoint is still held: mend that, or make an image (`sterna takeover --image`)"
            ),
        )
    }
}

impl Survivor for WaitingVm {
    fn memory(&self, blocks: &[(&str, u64)]) -> Result<Vec<Option<File>>, VmError> {
        let mut state = self.state.lock();
        let owned: Vec<_> = blocks.iter().map(|(name, length)| ((*name).to_owned(), *length)).collect();
        let mut files: Vec<Option<File>> = blocks.iter().map(|_| None).collect();
        for file in &self.files {
            let Some(index) = blocks.iter().position(|(name, _)| file.is_of(name)) else {
                let names: Vec<_> = blocks.iter().map(|(name, _)| *name).collect();
                let why = format!(
                    "the guest has no block {:?}, its blocks are {}: give the primary and the VM that waits the same id of their \
                     memory backends",
                    file.id,
                    names.join(", ")
                );
                return Err(VmError::new(file.path.display().to_string(), why));
            };
            let made = make(&file.path, blocks[index].1)
                .map_err(|error| VmError::new(format!("cannot create {}", file.path.display()), error))?;
            state.made.push(file.path.clone());
            files[index] = Some(made);
        }
        state.is_in_file = files.iter().map(Option::is_some).collect();
        state.blocks = owned;
        Ok(files)
    }

    fn prepare(&self, guest: &HeldGuest) -> Result<(), VmError> {
        let mut state = self.state.lock();
        let is_dead = state.vm.as_mut().is_none_or(|running| running.launched.has_ended());
        // One that has loaded something loads nothing any more.
        if is_dead || state.progress != Stage::Waits {
            self.launch_anew(&mut state).map_err(|error| Self::error(&error))?;
        }
        let State { vm, is_in_file, progress, .. } = &mut *state;
        let Some(Running { launched, vm, changed }) = vm else {
            return Err(VmError::new("the VM that waits", "is gone"));
        };
        *progress = Stage::None;
        *changed = load::load(vm, guest, is_in_file).map_err(|error| Self::error(&said(error, launched)))?;
        *progress = Stage::Loaded;
        Ok(())
    }

    fn start(&self) -> Result<(), VmError> {
        let mut state = self.state.lock();
        let State { vm, progress, .. } = &mut *state;
        match (progress, vm) {
            (Stage::Runs, _) => Ok(()),
            (progress @ Stage::Loaded, Some(Running { launched, vm, changed })) => match load::start(vm) {
                Ok(()) => {
                    *progress = Stage::Runs;
                    // It runs: what the operator's next migration needs is a matter of its own.
                    let _ = std::mem::take(changed).undo(vm);
                    Ok(())
                }
                Err((error, may_run)) => {
                    if may_run {
                        *progress = Stage::Unknown;
                    }
                    Err(Self::error(&said(error, launched)))
                }
            },
            (progress @ Stage::Unknown, Some(Running { launched, vm, .. })) => {
                if vm.run_state().is_ok_and(|state| state == "running") {
                    *progress = Stage::Runs;
                    return Ok(());
                }
                let why = if launched.has_ended() { "it has ended" } else { "it does not answer" };
                Err(VmError::new(tainted().what, format!("{}; {why}", tainted().why)))
            }
            _ => Err(VmError::new("the VM that waits", "nothing is loaded there")),
        }
    }

    fn discard(&self) {
        let mut state = self.state.lock();
        (state.vm, state.progress) = (None, Stage::None);
        remove(&mut state.made);
    }
}

impl Drop for WaitingVm {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        // Before the files: it maps them.
        state.vm = None;
        remove(&mut state.made);
    }
}

fn tainted() -> VmError {
    VmError::new(
        "the VM that waits",
        "it was told to run the guest and has not answered, so its memory is no checkpoint any more: look whether it runs",
    )
}

/// Keeps the names of those that cannot be removed.
fn remove(made: &mut Vec<PathBuf>) {
    made.retain(|path| std::fs::remove_file(path).is_err() && path.exists());
}

/// A file of zeros, for its owner alone. Nobody's file is taken.
fn make(path: &Path, length: u64) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create_new(true).mode(0o600).open(path)?;
    file.set_len(length).inspect_err(|_| {
        let _ = std::fs::remove_file(path);
    })?;
    Ok(file)
}

fn said(error: DriveError, launched: &Launched) -> DriveError {
    DriveError::Failed(format!("{error}{}", launched.said()))
}

/// Nobody watches.
struct Silent;

impl Watch for Silent {
    fn show(&mut self, _: &Progress) {}
    fn wish(&mut self) -> Wish {
        Wish::Continue
    }
    fn note(&mut self, _: &str) {}
}
