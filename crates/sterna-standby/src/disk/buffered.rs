//! One disk at its standby: its file, the buffered writes, and the primary's connection.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use sterna::error::{BadConnection, MigrationError, Misbehaviour, ProtectionDifference};
use sterna_transport::Channel;

use super::budget::Budget;
use super::file::{DiskFile, StandbyDisk};
use super::overlay::{Overlay, Written};

/// A disk of the guest.
pub(super) struct Disk {
    name: String,
    file: Arc<dyn DiskFile>,
    budget: Arc<Budget>,
    state: Mutex<State>,
    /// Locked by the thread that writes the held epoch to the file.
    committing: Mutex<()>,
}

struct State {
    phase: Phase,
    /// Writes of the current epoch, whose checkpoint is not held yet.
    epoch: Overlay,
    /// Writes of the held checkpoint, until they are in the file.
    held: Option<Arc<Overlay>>,
    /// Incremented when `epoch` becomes `held`, and when `held` is in the file. A concurrent read then starts again.
    moves: u64,
    channel: Option<Arc<Channel>>,
    /// Why this side does not have all of the guest's writes.
    trouble: Option<MigrationError>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Writes go to the file.
    Seeding,
    /// Writes are buffered.
    Epochs,
    /// Writes are refused.
    Over,
}

impl Disk {
    pub(super) fn new(disk: StandbyDisk, budget: Arc<Budget>) -> Self {
        let state = State {
            phase: Phase::Seeding,
            epoch: Overlay::default(),
            held: None,
            moves: 0,
            channel: None,
            trouble: None,
        };
        let StandbyDisk { name, file } = disk;
        Self { name, file, budget, state: Mutex::new(state), committing: Mutex::default() }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn len_bytes(&self) -> u64 {
        self.file.len_bytes()
    }

    /// Accepts `channel` as the primary's connection for this disk. During the seeding, a newer connection replaces
    /// an older one.
    pub(super) fn take(&self, channel: &Arc<Channel>) -> Result<(), MigrationError> {
        let mut state = self.state.lock();
        if state.phase != Phase::Seeding {
            let why = BadConnection::LateDisk { disk: self.name.clone() };
            return Err(Misbehaviour::Connection { peer: channel.peer().to_owned(), why }.into());
        }
        state.trouble = None;
        if let Some(before) = state.channel.replace(Arc::clone(channel)) {
            before.shutdown();
        }
        Ok(())
    }

    /// Records that the connection has ended. Returns the error for the reception, if checkpoints are already being
    /// received.
    pub(super) fn ended(&self, channel: &Arc<Channel>, why: &MigrationError) -> Option<MigrationError> {
        let mut state = self.state.lock();
        state.channel.as_ref().filter(|current| Arc::ptr_eq(current, channel))?;
        state.channel = None;
        let why = state.trouble.get_or_insert_with(|| why.clone()).clone();
        (state.phase == Phase::Epochs).then_some(why)
    }

    /// Reads the file's content, updated by the buffered writes.
    pub(super) fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
        loop {
            let (moves, held) = {
                let state = self.state.lock();
                (state.moves, state.held.clone())
            };
            self.file.read_at(to, at)?;
            if let Some(held) = held {
                held.copy_to(at, to);
            }
            let state = self.state.lock();
            if state.moves == moves {
                state.epoch.copy_to(at, to);
                return Ok(());
            }
        }
    }

    pub(super) fn write(&self, at: u64, data: &[u8]) -> Result<(), MigrationError> {
        self.change(data.len() as u64, false, |file| file.write_at(data, at), |epoch| epoch.write(at, data))
    }

    pub(super) fn zero(&self, at: u64, length: u64) -> Result<(), MigrationError> {
        self.change(length, true, |file| file.make_zero(at, length), |epoch| epoch.zero(at, length))
    }

    fn change(
        &self,
        length: u64,
        is_zero: bool,
        now: impl FnOnce(&dyn DiskFile) -> io::Result<()>,
        later: impl FnOnce(&mut Overlay),
    ) -> Result<(), MigrationError> {
        let mut state = self.state.lock();
        let done = match state.phase {
            // Under the lock, so that no write to the file is in progress when the epochs begin.
            Phase::Seeding => now(&*self.file).map_err(|error| self.failed("written", &error)),
            Phase::Epochs => {
                let room = Overlay::most_growth(length, is_zero);
                if self.budget.take(room) {
                    let before = state.epoch.bytes();
                    later(&mut state.epoch);
                    // The write may replace buffered data, so it may need less than was reserved.
                    self.budget.give_back(before + room - state.epoch.bytes());
                    Ok(())
                } else {
                    let (disk, limit_bytes) = (self.name.clone(), self.budget.limit_bytes());
                    Err(MigrationError::DiskBufferFull { disk, limit_bytes })
                }
            }
            Phase::Over => Err(MigrationError::Cancelled),
        };
        if let Err(why) = &done {
            state.trouble.get_or_insert(why.clone());
        }
        done
    }

    pub(super) fn begin_epochs(&self) -> Result<(), MigrationError> {
        let mut state = self.state.lock();
        if state.channel.is_none() && state.trouble.is_none() {
            return Err(ProtectionDifference::UnusedDisk { disk: self.name.clone() }.into());
        }
        self.check_locked(&state)?;
        state.phase = Phase::Epochs;
        Ok(())
    }

    pub(super) fn check(&self) -> Result<(), MigrationError> {
        let state = self.state.lock();
        if state.held.is_some() {
            let what = format!("disk {}: an epoch ends before the one before it was applied", self.name);
            return Err(MigrationError::Internal(what));
        }
        self.check_locked(&state)
    }

    fn check_locked(&self, state: &State) -> Result<(), MigrationError> {
        if let Some(why) = &state.trouble {
            return Err(why.clone());
        }
        // Checked here, because the server's thread may not have noticed yet that the connection is closed.
        match state.channel.as_ref().is_some_and(|channel| !channel.peer_has_closed()) {
            true => Ok(()),
            false => {
                let why = "the primary has closed it".to_owned();
                Err(MigrationError::DiskLost { disk: self.name.clone(), why })
            }
        }
    }

    pub(super) fn end_epoch(&self) {
        let mut state = self.state.lock();
        let epoch = std::mem::take(&mut state.epoch);
        state.held = Some(Arc::new(epoch));
        state.moves += 1;
    }

    pub(super) fn commit(&self) -> Result<(), MigrationError> {
        let _one = self.committing.lock();
        let Some(held) = self.state.lock().held.clone() else { return Ok(()) };
        for (at, written) in held.iter() {
            let done = match written {
                Written::Data(data) => self.file.write_at(data, at),
                Written::Zeros(length) => self.file.make_zero(at, length),
            };
            done.map_err(|error| self.failed("written", &error))?;
        }
        let mut state = self.state.lock();
        // The held epoch may have been discarded meanwhile.
        if state.held.take().is_some() {
            self.budget.give_back(held.bytes());
        }
        state.moves += 1;
        Ok(())
    }

    pub(super) fn take_over(&self) -> Result<(), MigrationError> {
        self.commit()?;
        self.file.sync().map_err(|error| self.failed("synchronized", &error))?;
        self.file.release().map_err(|error| self.failed("released", &error))
    }

    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        self.end_locked(&mut state, Phase::Over);
    }

    pub(super) fn discard(&self) {
        let mut state = self.state.lock();
        self.end_locked(&mut state, Phase::Over);
        if let Some(held) = state.held.take() {
            self.budget.give_back(held.bytes());
        }
        state.moves += 1;
    }

    pub(super) fn reset(&self) {
        let mut state = self.state.lock();
        self.end_locked(&mut state, Phase::Seeding);
        state.trouble = None;
    }

    fn end_locked(&self, state: &mut State, phase: Phase) {
        state.phase = phase;
        self.budget.give_back(state.epoch.bytes());
        state.epoch = Overlay::default();
        if let Some(channel) = state.channel.take() {
            channel.shutdown();
        }
    }

    fn failed(&self, what: &str, error: &io::Error) -> MigrationError {
        MigrationError::System(format!("disk {} could not be {what}: {error}", self.name), None)
    }
}
