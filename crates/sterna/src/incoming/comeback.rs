//! A source whose connection was lost comes back (specs/extension.md §13).
//!
//! Only a source that proves that it knows the migration's secret gets a byte, or changes anything.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sterna_proto::destination::{Destination, Event as Fed, State};
use sterna_transport::{Address, Channel};
use sterna_wire::extension::{MigrationSecret, ReconnectAnswer, ReconnectChannel, ReconnectHello};

use super::greeting::Greeting;
use super::postcopy::recovery;
use super::shared::Shared;
use crate::driver::Driver;
use crate::error::MigrationError;
use crate::interruption::Break;
use crate::reconnect::{Admission, Assembled};

/// Magic and version: who comes back in another version is not waited for.
const HEAD: usize = 8;
/// How often it is looked whether the migration has ended meanwhile.
const LOOK: Duration = Duration::from_millis(20);

impl Shared {
    /// Whether a source whose connection was lost can be waited for.
    pub(super) fn can_wait(&self) -> bool {
        let is_network = matches!(self.address, Address::Tcp { .. } | Address::Unix { .. });
        !self.params.reconnect_window.is_zero() && is_network && self.target.keeps_pages()
    }

    /// Something of this side's failed while the source is waited for.
    pub(super) fn fail_waiting(&self, error: MigrationError) {
        self.note_error(error);
        self.report(Fed::LocalFailure);
    }

    /// How long a source is waited for whose connection was lost: it may have noticed later than this side, by its limit.
    pub(super) fn comeback_limit(&self) -> Duration {
        match self.params.reconnect_window {
            Duration::ZERO => Duration::ZERO,
            window => window.saturating_add(self.params.limits.stall),
        }
    }

    /// Keeps how the connection was lost.
    pub(super) fn note_lost(&self, error: MigrationError) {
        self.lost.lock().get_or_insert(error);
    }

    /// How the connection was lost, once.
    pub(super) fn take_lost(&self) -> Option<MigrationError> {
        self.lost.lock().take()
    }

    /// Another session begins, with what stands before RAM.
    pub(super) fn begin_again(&self) {
        self.ram_has_begun.store(false, Ordering::Release);
        self.postcopy.begin_again();
    }

    /// The source does not come back, as `event` tells.
    pub(super) fn comes_no_more(&self, event: Fed) {
        let is_waited_for = |machine: &Destination| {
            machine.would_suspend() || matches!(machine.state(), State::Suspending | State::Suspended)
        };
        let state = self.driver().map(|driver| driver.inspect(|m| (is_waited_for(m), m.would_suspend())));
        match (state, event) {
            // Over a connection that is not lost it says so by closing it.
            (Some((true, true)), Fed::StatusAsked(_)) | (Some((false, _)) | None, _) => {}
            (Some((true, _)), _) => {
                self.note_error(MigrationError::Transport(
                    "the source has given the migration up".to_owned(),
                    None,
                ));
                self.report(event);
            }
        }
    }

    /// The source has said that it comes back after a loss. It brings pages from now on.
    pub(super) fn expect_comeback(&self) -> Result<(), MigrationError> {
        if !self.can_wait() {
            let what =
                "it announced to come back after a lost connection, and this side has not offered to wait";
            return Err(MigrationError::PeerMisbehaved { what: what.to_owned() });
        }
        self.rounds.note_held(&self.layout()?.ram);
        self.report(Fed::MayReconnect);
        Ok(())
    }
}

/// Takes a connection that begins as those of a source that comes back.
pub(super) fn take(shared: &Shared, greeting: &Greeting<'_>) -> Result<(), Break> {
    let channel = greeting.channel;
    let refuse = |why: &str| -> Break {
        let what = format!("a source that claims to come back from {} {why}", channel.peer());
        MigrationError::PeerMisbehaved { what }.into()
    };
    let (hello, secret) = read(shared, greeting, &refuse)?;
    let is_recovery = matches!(hello.channel, ReconnectChannel::Recovery | ReconnectChannel::Preempt);
    if !is_recovery && !shared.can_wait() {
        return Err(refuse("is not waited for: x-sterna-reconnect-window is 0 here"));
    }
    match hello.channel {
        ReconnectChannel::GivesUp => {
            if !shared.lobby.announce(hello.session) {
                return Err(refuse("has an old number"));
            }
            // If it does not learn that, it says so again, and is refused.
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
                return Err(refuse("has an old number: its connection is an old one, or comes twice"));
            }
            resume(shared, channel, &hello, &secret).map_err(&refuse)
        }
        ReconnectChannel::Lane(id) => {
            let whole = shared.lobby.put_lane(hello.session, id, channel);
            let whole = whole.map_err(|why| refuse(&format!("brings a multifd channel {why}")))?;
            whole.map_or(Ok(()), |assembled| begin(shared, &assembled).map_err(&refuse))
        }
        ReconnectChannel::Recovery | ReconnectChannel::Preempt => {
            Ok(recovery::take(shared, channel, &hello, &secret)?)
        }
    }
}

/// Reads the hello, and lets through who proves it.
fn read(
    shared: &Shared,
    greeting: &Greeting<'_>,
    refuse: &dyn Fn(&str) -> Break,
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
        return Err(refuse("came over a TLS session that cannot be identified"));
    }
    let known = shared.secret.lock().clone().filter(|(id, _)| id.0 == hello.migration_id);
    let Some((_, secret)) = known else {
        return Err(refuse("names a migration whose secret this side does not know"));
    };
    if !hello.is_authentic(&secret, &binding) {
        return Err(refuse("has no proof that it is the migration's source"));
    }
    Ok((hello, secret))
}

/// Its main channel has come. What is still read of the session before ends now: the source has left it.
fn resume(
    shared: &Shared,
    channel: &Arc<Channel>,
    hello: &ReconnectHello,
    secret: &MigrationSecret,
) -> Result<(), &'static str> {
    let Some(driver) = shared.driver() else { return Err("is too early") };
    if driver.inspect(Destination::would_suspend) {
        shared.note_lost(MigrationError::Transport(
            "the source has noticed that the connection is lost, and connects again".to_owned(),
            None,
        ));
        shared.report(Fed::ConnectionLost);
    }
    let limit = shared.params.limits.setup;
    let began = std::time::Instant::now();
    loop {
        match shared.lobby.admit(hello.session, LOOK) {
            Admission::Open => break,
            Admission::TooLate => match driver.inspect(Destination::state) {
                State::Failed => return answer(channel, hello, secret, &ReconnectAnswer::Over),
                _ => return Err("is too late: a newer one has come, or the migration is over"),
            },
            Admission::NotYet if driver.inspect(Destination::state) == State::Failed => {
                return answer(channel, hello, secret, &ReconnectAnswer::Over);
            }
            Admission::NotYet if began.elapsed() >= limit => return Err("could not be let in in time"),
            Admission::NotYet => {}
        }
    }
    let Some(holds) = shared.rounds.held() else { return Err("is not waited for") };
    if !shared.lobby.put_main(hello.session, channel) {
        return Err("is too late: a newer one has come");
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
) -> Result<(), &'static str> {
    let mut bytes = Vec::new();
    answer.encode(hello, secret, &channel.tls_binding(), &mut bytes);
    channel.write_all(&bytes).map_err(|_| "went away before it was answered")
}

/// All channels of a session are there.
fn begin(shared: &Shared, assembled: &Assembled) -> Result<(), &'static str> {
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
    Err("is too late: the migration has been given up")
}
