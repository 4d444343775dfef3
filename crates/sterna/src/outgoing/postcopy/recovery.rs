//! State for a new connection in place of a lost one (specs/postcopy.md §5, specs/extension.md §14).

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna_ram::GuestRam;
use sterna_transport::{Address, Channel};
use sterna_wire::extension::{Holds, ReconnectAnswer, ReconnectAnswerHead, ReconnectChannel, ReconnectHello};
use sterna_wire::received_pages::ReceivedPages;
use sterna_wire::return_path::ReturnMessage;

use crate::error::{BadAnswer, Ending, MigrationError, SettingDifference, Tls12Use};
use crate::identity::Identity;
use crate::postcopy::answers::{Answer, Answers};

const CHANNEL: &str = "answer on a new connection";

/// The recoveries of one migration.
pub(in crate::outgoing) struct Recovery {
    /// The address of the last connection, or of the next one.
    to: Mutex<Address>,
    session: Mutex<u32>,
    answers: Mutex<Option<Asked>>,
    count: Mutex<u64>,
}

/// The questions of a recovery, and the answers so far.
struct Asked {
    answers: Answers,
    received: Vec<(usize, ReceivedPages)>,
    blocks: usize,
}

impl Recovery {
    pub(in crate::outgoing) fn new(to: Address) -> Self {
        Self {
            to: Mutex::new(to),
            session: Mutex::default(),
            answers: Mutex::default(),
            count: Mutex::default(),
        }
    }

    /// The address of the destination.
    pub(in crate::outgoing) fn to(&self) -> Address {
        self.to.lock().clone()
    }

    /// Sets the address of the destination. Gives the earlier one.
    pub(in crate::outgoing) fn go_to(&self, to: Address) -> Address {
        std::mem::replace(&mut *self.to.lock(), to)
    }

    /// The number of the next attempt, which is larger than all earlier ones.
    pub(in crate::outgoing) fn begin_session(&self) -> u32 {
        let mut session = self.session.lock();
        *session += 1;
        *session
    }

    /// The number of the last attempt; 0 before the first loss.
    pub(in crate::outgoing) fn session(&self) -> u32 {
        *self.session.lock()
    }

    /// Records that the bitmaps of all blocks are about to be requested.
    pub(in crate::outgoing) fn asks(&self, ram: &GuestRam) {
        let names: Vec<_> = ram.blocks().iter().map(|block| block.name().to_owned()).collect();
        let blocks = names.len();
        let mut answers = Answers::new(names);
        (0..blocks).for_each(|block| answers.asked_bitmap(block));
        *self.answers.lock() = Some(Asked { answers, received: Vec::new(), blocks });
    }

    /// Takes the bitmaps after all have arrived.
    pub(in crate::outgoing) fn take_received(&self) -> Option<Vec<(usize, ReceivedPages)>> {
        let mut asked = self.answers.lock();
        let asked = asked.as_mut().filter(|asked| asked.received.len() == asked.blocks)?;
        Some(std::mem::take(&mut asked.received))
    }

    /// Records that the destination is about to be told to resume.
    pub(in crate::outgoing) fn resumes(&self) {
        if let Some(asked) = &mut *self.answers.lock() {
            asked.answers.resumed();
        }
    }

    /// Whether the destination was asked and has not resumed yet.
    pub(in crate::outgoing) fn is_under_way(&self) -> bool {
        self.answers.lock().is_some()
    }

    /// Takes a message that only a recovery may contain.
    ///
    /// `Some(block)`: the bitmap of that block follows. `None`: the destination has resumed.
    pub(in crate::outgoing) fn take(&self, message: ReturnMessage) -> Result<Option<usize>, MigrationError> {
        let mut asked = self.answers.lock();
        let Some(asked) = asked.as_mut() else {
            return Err(BadAnswer::NoRecovery(Box::new(message)).into());
        };
        match asked.answers.take(message)? {
            Answer::Bitmap { block } => Ok(Some(block)),
            _ => Ok(None),
        }
    }

    /// Adds a complete bitmap.
    pub(in crate::outgoing) fn received(&self, block: usize, pages: ReceivedPages) {
        if let Some(asked) = &mut *self.answers.lock() {
            asked.received.push((block, pages));
        }
    }

    /// Records that the destination has resumed.
    pub(in crate::outgoing) fn is_done(&self) {
        *self.answers.lock() = None;
        *self.count.lock() += 1;
    }

    /// The number of completed recoveries.
    pub(in crate::outgoing) fn count(&self) -> u64 {
        *self.count.lock()
    }
}

/// Proves to a Sterna that this is the migration's source.
///
/// The connection is channel `channel` of session `session`.
pub(in crate::outgoing) fn say_hello(
    channel: &Channel,
    identity: &Identity,
    (session, kind): (u32, ReconnectChannel),
    nonce: [u8; 16],
) -> Result<ReconnectHello, MigrationError> {
    let binding = channel.tls_binding();
    if channel.is_tls() && binding.is_none() {
        return Err(SettingDifference::Tls12(Tls12Use::Recovery).into());
    }
    let hello = ReconnectHello::new(identity.id, (session, kind), nonce, &identity.secret, &binding);
    let mut bytes = Vec::new();
    hello.encode(&mut bytes);
    channel.write_all(&bytes)?;
    Ok(hello)
}

/// Reads whether the destination accepts this side, and checks the destination's proof.
///
/// The proof shows that it is the migration's destination.
pub(in crate::outgoing) fn hear_answer(
    channel: &Channel,
    identity: &Identity,
    hello: &ReconnectHello,
) -> Result<(), MigrationError> {
    let mut head = [0; ReconnectAnswerHead::BYTES];
    channel.read_exact(&mut head).map_err(|error| {
        let (peer, error) = (channel.peer().to_owned(), Arc::new(error));
        Ending::NotAdmitted { peer, error }
    })?;
    let decoded = ReconnectAnswerHead::decode(&head, 0).map_err(MigrationError::wire(CHANNEL))?;
    let Some((head, _)) = decoded else {
        return Err(MigrationError::Internal("an answer of full length is incomplete".to_owned()));
    };
    match head.with_pages(Vec::new(), hello, &identity.secret, &channel.tls_binding()) {
        Some(ReconnectAnswer::Holds(Holds { session, rounds: 0, .. })) if session == hello.session => Ok(()),
        Some(ReconnectAnswer::Holds(Holds { session, rounds, .. })) => {
            Err(BadAnswer::HoldsInRecovery { admitted: hello.session, rounds, session }.into())
        }
        Some(ReconnectAnswer::Over) => Err(BadAnswer::NeverRuns.into()),
        None => Err(BadAnswer::NoProof { address: channel.peer().to_owned() }.into()),
    }
}

/// The time that is left until `until`, at least 1 ms.
pub(in crate::outgoing) fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

#[cfg(test)]
mod tests {
    use sterna_wire::extension::MigrationSecret;

    use super::*;

    #[test]
    fn answer_is_taken_for_this_session_and_with_nothing_of_precopy() {
        let identity = Identity { id: [1; 16], secret: MigrationSecret::from_bytes([2; 32]) };
        let holds = |session, rounds, pages: &[u8]| {
            ReconnectAnswer::Holds(Holds { session, rounds, pages: pages.to_vec() })
        };
        for (answer, refused) in [
            (holds(7, 0, &[]), None),
            (holds(6, 0, &[]), Some("of session 6")),
            (holds(7, 1, &[]), Some("read 1 rounds")),
            (holds(7, 0, &[1]), Some("at most 0 are accepted")),
            (ReconnectAnswer::Over, Some("never runs the guest")),
        ] {
            let (ours, theirs) = Channel::pair().unwrap();
            let hello =
                say_hello(&ours, &identity, (7, ReconnectChannel::Recovery), [3; 16]).expect("it is written");
            let mut bytes = Vec::new();
            answer.encode(&hello, &identity.secret, &None, &mut bytes);
            theirs.write_all(&bytes).unwrap();

            let heard = hear_answer(&ours, &identity, &hello).map_err(|error| error.to_string());

            match refused {
                None => assert_eq!(heard, Ok(())),
                Some(words) => assert!(heard.as_ref().is_err_and(|why| why.contains(words)), "{heard:?}"),
            }
        }
    }
}
