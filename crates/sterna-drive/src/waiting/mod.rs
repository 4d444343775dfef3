//! A QEMU that waits for the guest of a standby. The standby fills its RAM through a file, so only devices are loaded.
//!
//! The command line names the file: `-object memory-backend-file,id=ID,mem-path=DIR/FILE,share=on,size=…` and `-machine
//! …,memory-backend=ID`. The standby creates the file when it knows the guest's blocks, and stores the block ID there,
//! checkpoint by checkpoint. QEMU is started with `-incoming defer` when the guest has arrived, and changes nothing.
//! At the takeover QEMU gets the devices, and the blocks that are in no file, through a pipe (capability
//! `x-ignore-shared`), with the guest paused. All steps that can fail are done then. `cont` starts the guest, and only
//! then QEMU opens the disks (`late-block-activate`).

mod devices;
mod line;
mod load;

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, fallocate, fstatvfs};
use rustix::io::Errno;
use sterna::error::VmError;
use sterna_image::Shape;
use sterna_standby::{HeldDevice, HeldGuest, Survivor};

use super::restore::launch::Launched;
use super::{Changed, DriveError, Progress, Vm, Watch, Wish};
pub use line::RamFile;

/// A VM that waits for the guest, or will be started for that.
pub struct WaitingVm {
    command: Vec<OsString>,
    files: Vec<RamFile>,
    /// Directory for the monitor's socket and the VM's messages.
    directory: PathBuf,
    /// The guest will not run in this VM, so a running start is cancelled.
    is_given_up: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    machine_type: String,
    /// Names of the guest's device sections.
    devices: Vec<String>,
    /// Names and lengths of the guest's blocks.
    blocks: Vec<(String, u64)>,
    /// For each block: whether it is in a file.
    is_in_file: Vec<bool>,
    /// Files that this process has created.
    made: Vec<PathBuf>,
    vm: Option<Running>,
    launches: u32,
    progress: Stage,
}

struct Running {
    launched: Launched,
    vm: Vm,
    /// The settings that were changed for loading.
    changed: Changed,
}

/// Progress of the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Stage {
    #[default]
    None,
    /// The VM waits for the guest.
    Waits,
    /// The guest is loaded, and is paused.
    Loaded,
    /// The VM got `cont` and has not answered. Its RAM may have changed, so it is no checkpoint any more.
    Unknown,
    Runs,
}

/// The process that runs the guest after the standby ends.
#[derive(Debug, Clone)]
pub struct Survived {
    /// Id of the process.
    pub process: u32,
    /// Path of the monitor's socket.
    pub monitor: PathBuf,
    /// Path of the file with the VM's messages.
    pub log: PathBuf,
}

impl WaitingVm {
    /// A VM with this command, whose shared memory is in `ram`. `directory` must exist. It contains the monitor's
    /// socket, and stays if the VM continues to run. `replaces`: whether a file of an earlier standby is removed.
    ///
    /// # Errors
    /// [`DriveError::Request`]: the command cannot be used, or a file of the memory exists already.
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
                    "{} exists and may be the memory of a running guest. If no VM uses it, remove it, or use --force",
                    path.display()
                )));
            }
            // A VM that still maps the file keeps its memory.
            std::fs::remove_file(path).map_err(|error| DriveError::file("remove", path, error))?;
        }
        let (directory, is_given_up, state) =
            (directory.to_owned(), AtomicBool::new(false), Mutex::default());
        Ok(Self { command, files, directory, is_given_up, state })
    }

    /// Starts the VM, unless it waits already. Does nothing before the guest has arrived.
    ///
    /// # Errors
    /// The VM does not start, or has another machine than the guest.
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
        let mut watcher = Silent(&self.is_given_up);
        let checked = launched.vm(&mut watcher).and_then(|mut vm| {
            load::check(&mut vm, &state.machine_type, &state.blocks)?;
            devices::check(&mut vm, &state.devices)?;
            Ok(vm)
        });
        let vm = checked.map_err(|error| said(error, &launched))?;
        state.vm = Some(Running { launched, vm, changed: Changed::default() });
        state.progress = Stage::Waits;
        Ok(())
    }

    /// The state of the VM, in words.
    pub fn status(&self) -> String {
        // Another thread has the lock while it starts or loads the VM.
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

    /// Lets the VM that runs the guest continue without this process. None if the VM does not run the guest.
    pub fn release(&self) -> Option<Survived> {
        let mut state = self.state.lock();
        let runs = state.progress == Stage::Runs;
        let Running { launched, .. } = state.vm.take_if(|_| runs)?;
        let survived = Survived { process: launched.id(), monitor: launched.socket(), log: launched.log() };
        launched.release();
        state.made.clear();
        Some(survived)
    }

    /// Ends the VM before the guest is continued elsewhere.
    ///
    /// # Errors
    /// The guest may have run in this VM, so its RAM is no checkpoint any more.
    pub fn give_up(&self) -> Result<(), VmError> {
        let mut state = self.state.lock();
        if matches!(state.progress, Stage::Unknown | Stage::Runs) {
            return Err(tainted());
        }
        (state.vm, state.progress) = (None, Stage::None);
        Ok(())
    }

    /// Files with the guest's memory that this process has created.
    pub fn files(&self) -> Vec<PathBuf> {
        self.state.lock().made.clone()
    }

    fn error(error: &DriveError) -> VmError {
        VmError::new(
            "the VM that waits",
            format!(
                "{error}. The standby still holds the checkpoint: remove the cause, or write an image (`sterna \
                 takeover SOCKET --image`)"
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
                    "the guest has no block {:?}, its blocks are {}: use the same id for the memory backend of the \
                     primary and of the waiting VM",
                    file.id,
                    names.join(", ")
                );
                return Err(VmError::new(file.path.display().to_string(), why));
            };
            let made = make(&file.path, blocks[index].1)
                .map_err(|error| not_made(&file.path, blocks[index].1, &error))?;
            state.made.push(file.path.clone());
            files[index] = Some(made);
        }
        state.is_in_file = files.iter().map(Option::is_some).collect();
        state.blocks = owned;
        Ok(files)
    }

    fn check(&self, machine: &Shape, devices: &[HeldDevice]) -> Result<(), VmError> {
        // The VM is started later, and compared then: checkpoints are useful even without it.
        let mut state = self.state.lock();
        state.machine_type.clone_from(&machine.configuration.machine_type);
        state.devices = devices.iter().map(|device| device.name.clone()).collect();
        Ok(())
    }

    fn prepare(&self, guest: &HeldGuest) -> Result<(), VmError> {
        let mut state = self.state.lock();
        let is_dead = state.vm.as_mut().is_none_or(|running| running.launched.has_ended());
        // After a failed load, a VM cannot load again.
        if is_dead || state.progress != Stage::Waits {
            self.launch_anew(&mut state).map_err(|error| Self::error(&error))?;
        }
        let State { vm, is_in_file, progress, .. } = &mut *state;
        let Some(Running { launched, vm, changed }) = vm else {
            return Err(VmError::new("the VM that waits", "has ended"));
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
                    // The guest runs. A failure to restore settings only affects the operator's next migration.
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
        self.is_given_up.store(true, Ordering::Release);
        let mut state = self.state.lock();
        (state.vm, state.progress) = (None, Stage::None);
        remove(&mut state.made);
    }
}

impl Drop for WaitingVm {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        // The VM first, because it maps the files.
        state.vm = None;
        remove(&mut state.made);
    }
}

fn tainted() -> VmError {
    VmError::new(
        "the VM that waits",
        "it was told to run the guest and has not answered, so its memory may have changed: check whether it runs the \
         guest",
    )
}

/// Removes the files. Files that cannot be removed stay in the list.
fn remove(made: &mut Vec<PathBuf>) {
    made.retain(|path| std::fs::remove_file(path).is_err() && path.exists());
}

/// Creates a file of zeros that only its owner can access. An existing file is refused. The space is reserved: a page
/// without space would later cause a SIGBUS, which looks like a memory failure.
fn make(path: &Path, length: u64) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create_new(true).mode(0o600).open(path)?;
    let reserved = match fallocate(&file, FallocateFlags::empty(), 0, length) {
        // A file system that cannot reserve space at least reports its free space.
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            file.set_len(length).and_then(|()| check_space(&file, length))
        }
        reserved => reserved.map_err(std::io::Error::from),
    };
    reserved.inspect_err(|_| {
        let _ = std::fs::remove_file(path);
    })?;
    Ok(file)
}

fn check_space(file: &File, length: u64) -> std::io::Result<()> {
    let found = fstatvfs(file)?;
    match found.f_bavail.saturating_mul(found.f_frsize) < length {
        true => Err(Errno::NOSPC.into()),
        false => Ok(()),
    }
}

/// The error for a file of the guest's memory that cannot be created.
fn not_made(path: &Path, length: u64, error: &std::io::Error) -> VmError {
    let what = format!("cannot reserve {length} bytes of the guest's memory in {}", path.display());
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => {
            VmError::new(what, format!("{error}: free space there, or give another --ram-dir"))
        }
        _ => VmError::new(what, error),
    }
}

fn said(error: DriveError, launched: &Launched) -> DriveError {
    DriveError::Failed(format!("{error}{}", launched.said()))
}

/// A watcher without output, which cancels when the VM is given up.
struct Silent<'a>(&'a AtomicBool);

impl Watch for Silent<'_> {
    fn show(&mut self, _: &Progress) {}
    fn wish(&mut self) -> Wish {
        if self.0.load(Ordering::Acquire) { Wish::Cancel } else { Wish::Continue }
    }
    fn note(&mut self, _: &str) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_finds_no_space_is_refused_before_the_guest_comes() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("ram");
        let length = 1 << 62;

        let error = make(&path, length).unwrap_err();

        assert!(!path.exists(), "nothing is left");
        let told = not_made(&path, length, &error).to_string();
        assert!(told.contains("cannot reserve") && told.contains("--ram-dir"), "{told}");
    }

    #[test]
    fn memorys_space_is_reserved() {
        use std::os::unix::fs::MetadataExt;
        let place = tempfile::tempdir().unwrap();

        let file = make(&place.path().join("ram"), 1 << 20).unwrap();

        let found = file.metadata().unwrap();
        assert_eq!(found.len(), 1 << 20);
        assert!(found.blocks() * 512 >= 1 << 20, "{} blocks", found.blocks());
    }
}
