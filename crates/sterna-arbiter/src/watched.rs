//! Wraps an arbiter with a time limit and a check for contradictory rulings.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use parking_lot::Mutex;

use crate::arbiter::{Arbiter, Identity, Ruling};
use crate::claim::{Claim, Claimant, Generation, GuestName};
use crate::error::ClaimError;

/// Limit of calls that have not returned: a further call is refused. A hanging call cannot be cancelled.
const MOST_HANGING: usize = 32;

/// An arbiter with a time limit that remembers the rulings of the wrapped arbiter.
///
/// A call that exceeds the limit returns an error. Its thread continues, so the claim may still take effect. A
/// ruling that contradicts an earlier one is an error, and so is every later answer in that generation.
#[derive(Debug)]
pub struct Watched {
    inner: Arc<dyn Arbiter>,
    name: String,
    limit: Duration,
    hanging: Arc<AtomicUsize>,
    known: Mutex<HashMap<(GuestName, Generation), Known>>,
}

/// The rulings of the arbiter in one generation.
#[derive(Debug, Default)]
struct Known {
    winner: Option<Claimant>,
    losers: Vec<Claimant>,
    contradiction: Option<ClaimError>,
}

impl Watched {
    /// Wraps `inner`. `name` is its name in errors, and `limit` is the time for one call.
    pub fn new(inner: Arc<dyn Arbiter>, name: impl Into<String>, limit: Duration) -> Self {
        Self { inner, name: name.into(), limit, hanging: Arc::default(), known: Mutex::default() }
    }

    /// Makes a call in a new thread and waits for its result, up to the limit.
    fn limited<T: Send + 'static>(
        &self,
        call: impl FnOnce(&dyn Arbiter) -> Result<T, ClaimError> + Send + 'static,
    ) -> Result<T, ClaimError> {
        if self.hanging.load(Ordering::Acquire) >= MOST_HANGING {
            return Err(self.unreachable(
                format!("{MOST_HANGING} calls have not returned"),
                "repair the storage or the network that they wait for",
            ));
        }
        let (answer, answered) = sync_channel(1);
        let guard = Hanging::begin(&self.hanging);
        let inner = Arc::clone(&self.inner);
        let body = move || {
            let _guard = guard;
            // The receiver is dropped if the limit has passed.
            let _ = answer.send(call(&*inner));
        };
        std::thread::Builder::new().name("arbiter".to_owned()).spawn(body).map_err(|error| {
            self.unreachable(
                format!("cannot start a thread: {error}"),
                "free memory or raise the limit of the number of threads",
            )
        })?;
        match answered.recv_timeout(self.limit) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => Err(self.unreachable(
                format!("no answer within {:?}", self.limit),
                "check whether its storage or network hangs, then ask again",
            )),
            Err(RecvTimeoutError::Disconnected) => {
                Err(self
                    .unreachable("the call panicked".to_owned(), "report this as a defect of the arbiter"))
            }
        }
    }

    fn unreachable(&self, problem: String, remedy: &str) -> ClaimError {
        ClaimError::unreachable(&self.name, problem, remedy)
    }

    /// Compares a ruling with the earlier rulings of its generation.
    fn judge(&self, claim: &Claim, ruling: Ruling) -> Result<Ruling, ClaimError> {
        let mut known = self.known.lock();
        let known = known.entry((claim.guest.clone(), claim.generation)).or_default();
        if let Some(error) = &known.contradiction {
            return Err(error.clone());
        }
        match known.add(&claim.claimant, &ruling) {
            Ok(()) => Ok(ruling),
            Err(lie) => {
                let error = ClaimError::contradictory(
                    &self.name,
                    format!("in generation {} of {} {lie}", claim.generation, claim.guest),
                    "find out yourself which side runs the guest, and use another arbiter in the next generation",
                );
                known.contradiction = Some(error.clone());
                Err(error)
            }
        }
    }
}

impl Arbiter for Watched {
    fn claim(&self, claim: &Claim) -> Result<Ruling, ClaimError> {
        let key = (claim.guest.clone(), claim.generation);
        if let Some(error) = self.known.lock().get(&key).and_then(|known| known.contradiction.clone()) {
            return Err(error);
        }
        let asked = claim.clone();
        let ruling = self.limited(move |arbiter| arbiter.claim(&asked));
        match ruling {
            Ok(ruling) => self.judge(claim, ruling),
            Err(error) => {
                if error.is_contradictory() {
                    self.known.lock().entry(key).or_default().contradiction.get_or_insert(error.clone());
                }
                Err(error)
            }
        }
    }

    fn identity(&self, guest: &GuestName, generation: Generation) -> Result<Identity, ClaimError> {
        let guest = guest.clone();
        self.limited(move |arbiter| arbiter.identity(&guest, generation))
    }

    fn forget_identity(&self, guest: &GuestName, generation: Generation) {
        let guest = guest.clone();
        // A token that remains has no effect on claims.
        let _ = self.limited(move |arbiter| {
            arbiter.forget_identity(&guest, generation);
            Ok(())
        });
    }
}

impl Known {
    /// Records a ruling. The error text names the contradiction.
    fn add(&mut self, asker: &Claimant, ruling: &Ruling) -> Result<(), String> {
        let winner = match ruling {
            Ruling::Won => Some(asker),
            Ruling::Lost { winner } => winner.as_ref(),
        };
        if let (Some(before), Some(now)) = (&self.winner, winner)
            && before != now
        {
            return Err(format!("it answers that {now} has won, after it answered that {before} has won"));
        }
        if let Some(now) = winner.filter(|now| self.losers.contains(now)) {
            return Err(format!("it answers that {now} has won, after it answered that {now} has lost"));
        }
        if matches!(ruling, Ruling::Lost { .. }) {
            if winner == Some(asker) || self.winner.as_ref() == Some(asker) {
                return Err(format!("it answers that {asker} has lost, and that {asker} has won"));
            }
            if !self.losers.contains(asker) {
                self.losers.push(asker.clone());
            }
        }
        if let Some(now) = winner {
            self.winner = Some(now.clone());
        }
        Ok(())
    }
}

/// Counts a call until it has returned.
struct Hanging(Arc<AtomicUsize>);

impl Hanging {
    fn begin(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(count))
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests;
