//! The course of each session: figures over time for its record, and the last figures of those that have ended.

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::time::Instant;

use parking_lot::Mutex;
use sterna_relay::frame::SessionId;
use sterna_relay::relay::{Figures, Notice};

use crate::exit::Stop;
use crate::metrics::RelaySums;
use crate::relay_record::{RelayRecord, RelayRecorder};
use crate::{record, terminal};

/// Ended sessions whose figures metrics still have, so that a scraper sees their ends.
const MOST_ENDED: usize = 32;
/// How long they have them.
const KEPT: std::time::Duration = std::time::Duration::from_secs(300);

/// What the command remembers about its sessions.
pub(super) struct Book {
    directory: Option<PathBuf>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    open: HashMap<SessionId, RelayRecorder>,
    /// Records that the main loop writes.
    finished: Vec<RelayRecord>,
    ended: VecDeque<(Instant, Figures)>,
    sums: RelaySums,
}

impl Book {
    /// A book whose records go into `directory`.
    ///
    /// # Errors
    /// The directory does not exist.
    pub(super) fn new(directory: Option<&Path>) -> Result<Self, Stop> {
        if let Some(directory) = directory.filter(|directory| !directory.is_dir()) {
            return Err(Stop::usage(format!(
                "--report {}: the directory does not exist: create it, or choose another one",
                directory.display()
            )));
        }
        Ok(Self { directory: directory.map(Path::to_owned), state: Mutex::default() })
    }

    /// Notes a change. It is called while a session is locked, therefore it writes no file.
    pub(super) fn note(&self, notice: Notice) {
        let mut state = self.state.lock();
        let session = match &notice {
            Notice::Began { session, .. }
            | Notice::Phase { session, .. }
            | Notice::CarrierLost { session, .. }
            | Notice::CarrierBack { session, .. }
            | Notice::Lost { session, .. }
            | Notice::Back { session, .. }
            | Notice::Waiting { session, .. }
            | Notice::Ended { session, .. } => *session,
            Notice::Refused { session, .. } => {
                state.sums.refused += 1;
                let Some(session) = *session else { return };
                session
            }
            _ => return,
        };
        if matches!(notice, Notice::Began { .. }) {
            state.open.insert(session, RelayRecorder::begin());
            return;
        }
        match notice {
            Notice::Ended { how, in_order, figures, .. } => {
                if in_order {
                    state.sums.ended += 1;
                } else {
                    state.sums.broken += 1;
                }
                if let Some(recorder) = state.open.remove(&session)
                    && self.directory.is_some()
                {
                    state.finished.push(recorder.end(&figures, &how, in_order));
                }
                state.ended.push_back((Instant::now(), *figures));
                if state.ended.len() > MOST_ENDED {
                    state.ended.pop_front();
                }
            }
            other => {
                if let Some(recorder) = state.open.get_mut(&session) {
                    recorder.change(&what(&other));
                }
            }
        }
    }

    /// Takes the present figures into the courses, and writes the records of sessions that have ended.
    pub(super) fn look(&self, figures: &[Figures]) {
        let finished = {
            let mut state = self.state.lock();
            for now in figures {
                if let Some(recorder) = state.open.get_mut(&now.session) {
                    recorder.look(now);
                }
            }
            std::mem::take(&mut state.finished)
        };
        self.write(&finished);
    }

    /// Writes the records of all sessions. Those that are open get `why` as their end.
    pub(super) fn finish(&self, why: &str) {
        let mut state = self.state.lock();
        let mut finished = std::mem::take(&mut state.finished);
        finished.extend(state.open.drain().filter_map(|(_, recorder)| recorder.cut_off(why)));
        drop(state);
        self.write(&finished);
    }

    /// The last figures of sessions that have ended lately.
    pub(super) fn ended(&self) -> Vec<Figures> {
        let mut state = self.state.lock();
        state.ended.retain(|(at, _)| at.elapsed() < KEPT);
        state.ended.iter().map(|(_, figures)| figures.clone()).collect()
    }

    pub(super) fn sums(&self, limit: u64) -> RelaySums {
        RelaySums { limit, ..self.state.lock().sums }
    }

    fn write(&self, records: &[RelayRecord]) {
        let Some(directory) = &self.directory else { return };
        for record in records {
            let file = directory.join(format!("{}-{}-{}.json", record.route, record.session, record.role));
            if let Err(error) = record::write_whole(&file, &record.to_json()) {
                // The migration itself is not affected.
                terminal::note(&format!("sterna: warning: {error}"));
            }
        }
    }
}

/// The notice without the session's name.
fn what(notice: &Notice) -> String {
    let text = notice.to_string();
    text.split_once(": ").map_or_else(|| text.clone(), |(_, what)| what.to_owned())
}
