//! The source's side of a reconnection: opens the channels of a new session.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_transport::{Address, CancelFlag, Channel, Tls};
use sterna_wire::extension::{
    Holds, ReconnectAnswer, ReconnectAnswerHead, ReconnectChannel, ReconnectHello, most_held_bytes,
};

use crate::error::{BadAnswer, MigrationError, SettingDifference, Tls12Use};
use crate::identity::{self, Identity};
use crate::threads::side_by_side;

const CHANNEL: &str = "answer on a new connection";

/// One attempt to begin a session.
pub(crate) struct Dialling<'a> {
    pub(crate) to: &'a Address,
    pub(crate) tls: Option<&'a Tls>,
    pub(crate) identity: &'a Identity,
    /// The session's number, larger than the number of any earlier attempt.
    pub(crate) session: u32,
    /// Number of multifd channels.
    pub(crate) lanes: u8,
    /// Number of pages of each block.
    pub(crate) block_pages: &'a [u64],
    /// Limit of the whole attempt.
    pub(crate) limit: Duration,
    pub(crate) cancel: &'a CancelFlag,
}

/// The channels of a session that may begin.
pub(crate) struct Dialled {
    pub(crate) session: u32,
    pub(crate) main: Arc<Channel>,
    pub(crate) lanes: Vec<Arc<Channel>>,
    /// The pages that the destination reports as received.
    pub(crate) holds: Holds,
}

/// Why no session could be begun.
#[derive(Debug)]
pub(crate) enum DialError {
    /// The destination does not continue this migration.
    Over,
    /// The attempt failed. Another one may succeed.
    Failed(MigrationError),
}

/// Most channels that are connected in parallel.
const AT_ONCE: usize = 32;
/// Delay between two attempts to announce the end.
const AGAIN: Duration = Duration::from_millis(50);

impl<E: Into<MigrationError>> From<E> for DialError {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

impl Dialling<'_> {
    /// Opens the main channel, asks for the pages that the destination holds, and opens the other channels in
    /// parallel. `adopt` gets each channel before the first byte is sent.
    pub(crate) fn dial(&self, adopt: impl Fn(Channel) -> Arc<Channel> + Sync) -> Result<Dialled, DialError> {
        let until = Instant::now() + self.limit;
        let (main, hello) = self.open(ReconnectChannel::Main, until, &adopt)?;
        let holds = self.answer(&main, &hello)?;
        let cancel = self.cancel.child();
        let others = Dialling { cancel: &cancel, ..*self };
        let lane =
            |id: usize| others.open(ReconnectChannel::Lane(id as u8), until, &adopt).map(|(lane, _)| lane);
        let lanes = side_by_side(usize::from(self.lanes), AT_ONCE, lane, || cancel.cancel())?;
        Ok(Dialled { session: self.session, main, lanes, holds })
    }

    /// Opens one connection, and sends its hello.
    fn open(
        &self,
        channel: ReconnectChannel,
        until: Instant,
        adopt: impl Fn(Channel) -> Arc<Channel>,
    ) -> Result<(Arc<Channel>, ReconnectHello), DialError> {
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let opened = Channel::connect_with(self.to, self.tls, left, self.cancel, |opened| {
            opened.set_stall_limit(Some(left));
            adopt(opened)
        })?;
        let binding = opened.tls_binding();
        if self.tls.is_some() && binding.is_none() {
            return Err(MigrationError::from(SettingDifference::Tls12(Tls12Use::Reconnection)).into());
        }
        let Identity { id, secret } = self.identity;
        let hello = ReconnectHello::new(*id, (self.session, channel), identity::nonce()?, secret, &binding);
        let mut bytes = Vec::new();
        hello.encode(&mut bytes);
        opened.write_all(&bytes)?;
        Ok((opened, hello))
    }

    fn answer(&self, main: &Channel, hello: &ReconnectHello) -> Result<Holds, DialError> {
        let mut head = [0; ReconnectAnswerHead::BYTES];
        main.read_exact(&mut head)?;
        let most = most_held_bytes(self.block_pages);
        let decoded = ReconnectAnswerHead::decode(&head, most).map_err(MigrationError::wire(CHANNEL))?;
        let Some((head, _)) = decoded else {
            let what = "an answer of full length is incomplete";
            return Err(MigrationError::Internal(what.to_owned()).into());
        };
        let mut pages = vec![0; head.pages_bytes as usize];
        main.read_exact(&mut pages)?;
        match head.with_pages(pages, hello, &self.identity.secret, &main.tls_binding()) {
            Some(ReconnectAnswer::Holds(holds)) => Ok(holds),
            Some(ReconnectAnswer::Over) => Err(DialError::Over),
            None => Err(MigrationError::from(BadAnswer::NoProof { address: self.to.to_string() }).into()),
        }
    }
}

/// Tells the destination that the source will not reconnect. Repeats this until the destination confirms or the
/// limit is over, because written bytes may not have arrived.
pub(crate) fn give_up(dialling: &Dialling<'_>) {
    let until = Instant::now() + dialling.limit;
    loop {
        let opened = dialling.open(ReconnectChannel::GivesUp, until, Arc::new);
        let error = match opened.and_then(|(channel, hello)| dialling.answer(&channel, &hello)) {
            Err(DialError::Over) => return,
            Err(DialError::Failed(error)) => Some(error),
            Ok(_) => None,
        };
        if Instant::now() + AGAIN >= until {
            tracing::debug!(?error, "the destination does not learn that this side gives up");
            return;
        }
        std::thread::sleep(AGAIN);
    }
}
