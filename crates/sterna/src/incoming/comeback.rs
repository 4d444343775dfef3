//! Lets a source reconnect after its connection was lost (specs/extension.md §13).
//!
//! A source receives data and changes state only after it has proved that it knows the migration's secret.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sterna_proto::destination::{Destination, Event as Fed, State};
use sterna_transport::Channel;
use sterna_wire::extension::{MigrationSecret, ReconnectAnswer, ReconnectChannel, ReconnectHello};

use super::greeting::Greeting;
use super::postcopy::recovery;
use super::shared::Shared;
use crate::driver::Driver;
use crate::error::{BadComeback, Ending, MigrationError, Misbehaviour, Unproven, Untimely};
use crate::interruption::Break;
use crate::reconnect::{Admission, Assembled};

/// Bytes of magic and version. They are checked first, so that a hello of another version fails without waiting
/// for the rest.
const HEAD: usize = 8;
/// Interval at which the thread checks whether the migration has ended meanwhile.
const LOOK: Duration = Duration::from_millis(20);

impl Shared {
    /// Whether this side can wait for a source whose connection was lost.
    pub(super) fn can_wait(&self) -> bool {
        !self.params.reconnect_window.is_zero() && self.can_be_dialled_again && self.target.keeps_pages()
    }

    /// Reports an error of this side while it waits for the source.
    pub(super) fn fail_waiting(&self, error: MigrationError) {
        self.note_error(error);
        self.report(Fed::LocalFailure);
    }

    /// How long this side waits for a source whose connection was lost. The source may notice the loss later
    /// than this side, by at most its stall limit.
    pub(super) fn comeback_limit(&self) -> Duration {
        match self.params.reconnect_window {
            Duration::ZERO => Duration::ZERO,
            window => window.saturating_add(self.params.limits.stall),
        }
    }

    /// Stores why the connection was lost. The first error is kept.
    pub(super) fn note_lost(&self, error: MigrationError) {
        self.lost.lock().get_or_insert(error);
    }

    /// Takes the stored error, so that it is used only once.
    pub(super) fn take_lost(&self) -> Option<MigrationError> {
        self.lost.lock().take()
    }

    /// Begins another session, with the elements that precede RAM.
    pub(super) fn begin_again(&self) {
        self.ram_has_begun.store(false, Ordering::Release);
        self.postcopy.begin_again();
    }

    /// Ends the wait for the source, which does not reconnect. `event` is the reason.
    pub(super) fn comes_no_more(&self, event: Fed) {
        let is_waited_for = |machine: &Destination| {
            machine.would_suspend() || matches!(machine.state(), State::Suspending | State::Suspended)
        };
        let state = self.driver().map(|driver| driver.inspect(|m| (is_waited_for(m), m.would_suspend())));
        match (state, event) {
            // While its connection is not lost, the source ends the migration by closing that connection.
            (Some((true, true)), Fed::StatusAsked(_)) | (Some((false, _)) | None, _) => {}
            (Some((true, _)), _) => {
                self.note_error(Ending::GivenUp.into());
                self.report(event);
            }
        }
    }

    /// The source has announced that it reconnects after a loss. Its pages follow.
    pub(super) fn expect_comeback(&self) -> Result<(), MigrationError> {
        if !self.can_wait() {
            return Err(Untimely::Comeback.into());
        }
        self.rounds.note_held(&self.layout()?.ram);
        self.report(Fed::MayReconnect);
        self.watch_for_silence();
        Ok(())
    }
}

/// Handles a connection that begins with a reconnect hello.
pub(super) fn take(shared: &Shared, greeting: &Greeting<'_>) -> Result<(), Break> {
    let channel = greeting.channel;
    let refuse = |why| -> Break { refused(channel, why).into() };
    let (hello, secret) = read(shared, greeting, &refuse)?;
    let is_recovery = matches!(hello.channel, ReconnectChannel::Recovery | ReconnectChannel::Preempt);
    if !is_recovery && !shared.can_wait() {
        return Err(refuse(BadComeback::NoWindow));
    }
    match hello.channel {
        ReconnectChannel::GivesUp => {
            if !shared.lobby.announce(hello.session) {
                return Err(refuse(BadComeback::OldNumber));
            }
            // The answer may fail: a source that does not receive it repeats its message, and the repetition is
            // refused.
            let _ = answer(channel, &hello, &secret, &ReconnectAnswer::Over);
            shared.comes_no_more(Fed::SourceGaveUp);
            Ok(())
        }
        ReconnectChannel::Main => {
            let is_over = |driver: &Driver<Destination>| driver.inspect(Destination::state) == State::Failed;
            if shared.driver().is_some_and(is_over) {
                let over = answer(channel, &hello, &secret, &ReconnectAnswer::Over);
                return over.map_err(&refuse);
            }
            if !shared.lobby.announce(hello.session) {
                return Err(refuse(BadComeback::OldNumber));
            }
            resume(shared, channel, &hello, &secret).map_err(&refuse)
        }
        ReconnectChannel::Lane(id) => {
            let whole = shared.lobby.put_lane(hello.session, id, channel);
            let whole = whole.map_err(|why| refuse(why.into()))?;
            whole.map_or(Ok(()), |assembled| begin(shared, &assembled).map_err(&refuse))
        }
        ReconnectChannel::Recovery | ReconnectChannel::Preempt => {
            Ok(recovery::take(shared, channel, &hello, &secret)?)
        }
    }
}

/// The error for a source that reconnects and is not admitted.
fn refused(channel: &Channel, why: BadComeback) -> MigrationError {
    Misbehaviour::Comeback { peer: channel.peer().to_owned(), why }.into()
}

/// Reads the hello, and accepts it only with a valid proof.
fn read(
    shared: &Shared,
    greeting: &Greeting<'_>,
    refuse: &dyn Fn(BadComeback) -> Break,
) -> Result<(ReconnectHello, MigrationSecret), Break> {
    let wire = || MigrationError::wire("reconnect hello");
    let mut bytes = [0; ReconnectHello::BYTES];
    let (head, rest) = bytes.split_at_mut(HEAD);
    greeting.read_exact(head)?;
    ReconnectHello::decode(head).map_err(wire())?;
    greeting.read_exact(rest)?;
    let Some((hello, _)) = ReconnectHello::decode(&bytes).map_err(wire())? else {
        let what = "a reconnect hello of full length is incomplete";
        return Err(MigrationError::Internal(what.to_owned()).into());
    };
    let binding = greeting.channel.tls_binding();
    if shared.params.tls.is_some() && binding.is_none() {
        return Err(refuse(Unproven::UnidentifiedSession.into()));
    }
    let known = shared.secret.lock().clone().filter(|(id, _)| id.0 == hello.migration_id);
    let Some((_, secret)) = known else {
        return Err(refuse(Unproven::UnknownMigration.into()));
    };
    if !hello.is_authentic(&secret, &binding) {
        return Err(refuse(Unproven::NoProof.into()));
    }
    Ok((hello, secret))
}

/// Takes the new main channel. Reading of the previous session ends now, because the source has left that
/// session.
fn resume(
    shared: &Shared,
    channel: &Arc<Channel>,
    hello: &ReconnectHello,
    secret: &MigrationSecret,
) -> Result<(), BadComeback> {
    let Some(driver) = shared.driver() else { return Err(BadComeback::TooEarly) };
    if driver.inspect(Destination::would_suspend) {
        shared.note_lost(Ending::SourceReconnects.into());
        shared.report(Fed::ConnectionLost);
    }
    let limit = shared.params.limits.setup;
    let began = std::time::Instant::now();
    loop {
        match shared.lobby.admit(hello.session, LOOK) {
            Admission::Open => break,
            Admission::TooLate => match driver.inspect(Destination::state) {
                State::Failed => return answer(channel, hello, secret, &ReconnectAnswer::Over),
                _ => return Err(BadComeback::SupersededOrOver),
            },
            Admission::NotYet if driver.inspect(Destination::state) == State::Failed => {
                return answer(channel, hello, secret, &ReconnectAnswer::Over);
            }
            Admission::NotYet if began.elapsed() >= limit => return Err(BadComeback::NotInTime),
            Admission::NotYet => {}
        }
    }
    let Some(holds) = shared.rounds.held() else { return Err(BadComeback::NotAwaited) };
    if !shared.lobby.put_main(hello.session, channel) {
        return Err(BadComeback::Superseded);
    }
    answer(channel, hello, secret, &ReconnectAnswer::Holds(holds))?;
    match shared.lobby.answered(hello.session) {
        Some(assembled) => begin(shared, &assembled),
        None => Ok(()),
    }
}

fn answer(
    channel: &Channel,
    hello: &ReconnectHello,
    secret: &MigrationSecret,
    answer: &ReconnectAnswer,
) -> Result<(), BadComeback> {
    let mut bytes = Vec::new();
    answer.encode(hello, secret, &channel.tls_binding(), &mut bytes);
    channel.write_all(&bytes).map_err(|_| BadComeback::WentAway)
}

/// Resumes the migration when all channels of a session are connected.
fn begin(shared: &Shared, assembled: &Assembled) -> Result<(), BadComeback> {
    let Assembled { session, main, lanes } = assembled;
    shared.rounds.begin_session(*session);
    for channel in lanes.iter().chain([main]) {
        shared.begin_waiting_for(channel);
    }
    shared.places.resume(main, lanes);
    let resumed = shared.driver().map(|driver| driver.feed(Fed::Resumed));
    if matches!(resumed, Some(Ok(State::Active))) {
        return Ok(());
    }
    lanes.iter().chain([main]).for_each(|channel| channel.shutdown());
    Err(BadComeback::GivenUp)
}
