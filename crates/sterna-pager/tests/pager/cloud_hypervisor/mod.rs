//! Machines of a peer that speaks Cloud Hypervisor's side of its migrations: saved, and restored.

mod damage;
mod lazy;
mod restores;
mod saves;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_image::convert::ConvertOptions;
use sterna_pager::cloud_hypervisor::{
    Restore, RestorePlan, Save, SavePlan, SavedGuest, SavedMachine, SessionError,
};
use sterna_pager::{GuestEnd, GuestError, GuestStage, GuestStatistics};
use sterna_store::StoredImage;
use sterna_uffd_peer::cloud_hypervisor::{Machine, OK, Sender, command};

const MIB: u64 = 1 << 20;
/// Limit of every wait.
const PATIENCE: Duration = Duration::from_secs(60);

/// A directory, and a machine.
struct World {
    directory: tempfile::TempDir,
    machine: Machine,
}

impl World {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap(), machine: Machine::new(2 * MIB, MIB + 0x3000) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn socket(&self) -> PathBuf {
        self.path("ch.sock")
    }

    fn image(&self) -> PathBuf {
        self.path("vm.sterna")
    }

    /// Starts a save.
    fn save(&self) -> Save {
        self.save_to(&self.image())
    }

    fn save_to(&self, image: &Path) -> Save {
        let options = ConvertOptions { threads: 2, ..ConvertOptions::default() };
        Save::start(SavePlan { socket: self.socket(), image: image.to_owned(), options }).unwrap()
    }

    /// Saves the machine.
    fn saved(&self) -> SavedGuest {
        let save = self.save();
        let vmm = Sender::connect(&self.socket()).unwrap();
        vmm.begin(&self.machine).unwrap();
        assert_eq!(vmm.request(command::COMPLETE, &[], &[]).unwrap(), Some(OK));
        result(&save).unwrap()
    }

    /// The machine in an image at `path`.
    fn open(&self, path: &Path) -> Arc<SavedMachine> {
        let image = StoredImage::open(path, None).unwrap();
        Arc::new(SavedMachine::new(&image, 4 * MIB).unwrap())
    }

    /// Starts to restore the saved machine.
    fn restore(&self, is_lazy: bool) -> Restore {
        self.restore_of(&self.image(), is_lazy)
    }

    fn restore_of(&self, image: &Path, is_lazy: bool) -> Restore {
        let plan = RestorePlan { is_lazy, threads: 2, ..RestorePlan::new(self.socket()) };
        Restore::start(self.open(image), plan).unwrap()
    }

    /// Names of all files that are there, except those of `known`.
    fn others(&self, known: &[&str]) -> Vec<String> {
        let names = self.directory.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name());
        names.map(|name| name.into_string().unwrap()).filter(|name| !known.contains(&name.as_str())).collect()
    }
}

/// Waits for the result of a save.
fn result(save: &Save) -> Result<SavedGuest, SessionError> {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(result) = save.result() {
            return result;
        }
        assert!(Instant::now() < end, "the save does not end: {:?}", save.progress());
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits for the end of a restore.
fn ended(restore: &Restore) -> GuestStatistics {
    let end = Instant::now() + PATIENCE;
    loop {
        let statistics = restore.statistics();
        if statistics.is_over() {
            return statistics;
        }
        assert!(Instant::now() < end, "the restore does not end: {statistics:#?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Whether the restore ended with all memory there.
fn is_completed(statistics: &GuestStatistics) -> bool {
    matches!(statistics.stage, GuestStage::Ended(GuestEnd::Completed))
}

/// Asserts that the restore failed, and gives its error to `check`.
fn failed(restore: &Restore, check: impl FnOnce(&SessionError) -> bool) -> String {
    let statistics = ended(restore);
    let GuestStage::Ended(GuestEnd::GivenUp { why: GuestError::Session(why), is_killed: false }) =
        statistics.stage
    else {
        panic!("it did not fail: {statistics:#?}");
    };
    let error = why.downcast_ref::<SessionError>().unwrap();
    assert!(check(error), "{error:?}");
    error.to_string()
}
