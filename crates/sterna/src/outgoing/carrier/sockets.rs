//! Connections over sockets: a main channel, and with multifd one channel for each lane.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_transport::{CancelFlag, Channel, TransportError};
use sterna_wire::extension;
use sterna_wire::main::Command;

use super::facts::Facts;
use super::interface::Carrier;
use super::stream::{begin_ram, greet, main_channel, say_hello};
use super::transport::{Opened, Question, Transport};
use super::writers::{Writers, main_lane, multifd_lanes, multifd_shared, sends_zeros_on_main};
use crate::error::{Ending, MigrationError};
use crate::interruption::Break;
use crate::outgoing::limits::CONNECTED_AT_ONCE;
use crate::outgoing::main_channel::MainChannel;
use crate::outgoing::reconnection::watch;
use crate::outgoing::same_host::handing_over::hand_memory_over;
use crate::outgoing::shared::Shared;
use crate::outgoing::waits::Waits;
use crate::params::MigrationMode;
use crate::threads::side_by_side;

/// A connect phase that lasts longer may be the reason why the destination closed the main channel: it is silent meanwhile.
const LONG: Duration = Duration::from_secs(3);

/// The transport of `tcp:` and `unix:`.
pub(super) static NETWORK: Transport = Transport { facts: FACTS, open, ask };

/// The transport of descriptors, which this side cannot open again.
pub(super) static DESCRIPTOR: Transport = Transport {
    facts: Facts { can_ask: false, can_reconnect: false, gains_by_multifd: false, ..FACTS },
    open,
    ask,
};

const FACTS: Facts = Facts {
    stores: false,
    can_ask: true,
    can_reconnect: true,
    gains_by_multifd: true,
    takes_device_packets: true,
    gains_by_hints: true,
    counts_rdma: false,
};

fn open(shared: &Arc<Shared>) -> Opened {
    Ok(Box::new(Sockets::open(shared)?))
}

/// A carrier over open connections.
pub(in crate::outgoing) struct Sockets {
    shared: Arc<Shared>,
    main: Arc<MainChannel>,
    multifd: Vec<Arc<Channel>>,
}

impl Sockets {
    /// Connects the main channel and, with multifd, one channel per lane.
    fn open(shared: &Arc<Shared>) -> Result<Self, MigrationError> {
        let params = shared.params();
        // The limit applies to all connections together.
        let began = Instant::now();
        let open = |cancel: &CancelFlag| -> Result<Arc<Channel>, TransportError> {
            let left = params.limits.setup.saturating_sub(began.elapsed());
            Channel::connect_with(&shared.session.to, params.tls.as_ref(), left, cancel, |channel| {
                channel.set_stall_limit(Some(params.limits.stall));
                watch::connected(&channel, &params);
                shared.adopt(channel)
            })
        };
        // A QEMU that uses TLS takes the first connection whose handshake ends as the main channel.
        let channel = open(&shared.session.connecting)?;
        let main = main_channel(shared, Arc::clone(&channel));
        if !shared.capabilities.multifd {
            return Ok(Self::of(shared, main, Vec::new()));
        }
        // The channels connect in parallel: each one takes one to three round trips, and the main channel is
        // silent meanwhile.
        let cancel = shared.session.connecting.child();
        let lane = |id: usize| -> Result<_, MigrationError> {
            let lane = open(&cancel)?;
            say_hello(shared, &lane, id as u8)?;
            Ok(lane)
        };
        let lanes = usize::from(params.multifd_channels);
        let multifd = side_by_side(lanes, CONNECTED_AT_ONCE, lane, || cancel.cancel());
        if began.elapsed() >= LONG && channel.peer_has_closed() {
            return Err(closed_meanwhile(lanes, began.elapsed()));
        }
        Ok(Self::of(shared, main, multifd?))
    }

    /// Sockets over connections that are already open.
    pub(in crate::outgoing) fn of(
        shared: &Arc<Shared>,
        main: Arc<MainChannel>,
        multifd: Vec<Arc<Channel>>,
    ) -> Self {
        Self { shared: Arc::clone(shared), main, multifd }
    }
}

impl Carrier for Sockets {
    fn main(&self) -> &Arc<MainChannel> {
        &self.main
    }

    fn multifd(&self) -> &[Arc<Channel>] {
        &self.multifd
    }

    fn greet(&self) -> Result<(), MigrationError> {
        greet(&self.shared, &self.main)
    }

    fn enter(&mut self, waits: &mut Waits) -> Result<(), Break> {
        match self.shared.params().mode {
            MigrationMode::CprTransfer => hand_memory_over(&self.shared, &self.main, waits),
            _ => Ok(()),
        }
    }

    fn begin_ram(&mut self) -> Result<(), MigrationError> {
        begin_ram(&self.shared, &self.main)
    }

    fn lanes(&mut self) -> Result<Writers, MigrationError> {
        let (shared, main) = (&self.shared, &self.main);
        let lanes = match shared.capabilities.multifd {
            true => multifd_lanes(shared, &multifd_shared(shared, main), &self.multifd)?,
            false => vec![main_lane(shared, main)?],
        };
        Ok(Writers::new(shared, lanes, sends_zeros_on_main(shared)))
    }

    fn end_round(&self, _is_last: bool) -> Result<(), MigrationError> {
        if !self.shared.capabilities.multifd {
            return Ok(());
        }
        let marks = self.shared.reconnection.confirms_rounds();
        self.main.with(|stream| {
            stream.ram_part(false, true)?;
            if marks { stream.commands(&[Command::Ping(extension::ROUND_PING)]) } else { Ok(()) }
        })
    }

    fn end_ram(&self) -> Result<(), MigrationError> {
        self.main.with(|stream| stream.ram_part(true, false))
    }

    fn end(&self) -> Result<(), MigrationError> {
        self.main.with(|stream| self.shared.guest.source.send_end(stream))
    }
}

/// Opens a connection for a status question.
pub(in crate::outgoing) fn ask(question: &Question<'_>) -> Result<Arc<Channel>, MigrationError> {
    let Question { shared, to, limit, cancel, adopt } = question;
    let params = shared.params();
    Ok(Channel::connect_with(to, params.tls.as_ref(), *limit, cancel, adopt)?)
}

/// The destination closed the main channel while the others were being connected.
fn closed_meanwhile(lanes: usize, after: Duration) -> MigrationError {
    Ending::WhileConnecting { channels: lanes, after }.into()
}
