//! The carrier that sends guests over RDMA.

use std::sync::Arc;

use sterna_transport::Channel;

use super::connect::connect;
use super::packet_lane::PacketLane;
use super::registering::register;
use super::source::RdmaSource;
use super::windows::{ask, ask_for_lanes};
use super::work::Work;
use super::write_lane::RdmaLane;
use crate::error::MigrationError;
use crate::events::Event;
use crate::outgoing::carrier::interface::Carrier;
use crate::outgoing::carrier::stream::{greet, main_channel, say_hello};
use crate::outgoing::carrier::writers::{Writers, multifd_shared};
use crate::outgoing::lanes::LaneEnds;
use crate::outgoing::main_channel::MainChannel;
use crate::outgoing::shared::Shared;
use crate::outgoing::workers::Workers;
use crate::threads::ThreadRole;

/// A connected source, and once pages move what is registered.
pub(in crate::outgoing) struct RdmaCarrier {
    shared: Arc<Shared>,
    main: Arc<MainChannel>,
    multifd: Vec<Arc<Channel>>,
    source: Arc<RdmaSource>,
    work: Option<Arc<Work>>,
}

impl RdmaCarrier {
    pub(in crate::outgoing) fn open(shared: &Arc<Shared>) -> Result<Self, MigrationError> {
        let source = connect(shared, &shared.params())?;
        let main = main_channel(shared, Arc::clone(&source.channel));
        let multifd: Vec<_> = source.lanes.iter().map(|(_, channel)| Arc::clone(channel)).collect();
        for (id, channel) in (0..).zip(&multifd) {
            say_hello(shared, channel, id)?;
        }
        Ok(Self { shared: Arc::clone(shared), main, multifd, source, work: None })
    }

    fn has_lanes(&self) -> bool {
        self.shared.capabilities.multifd
    }
}

impl Carrier for RdmaCarrier {
    fn main(&self) -> &Arc<MainChannel> {
        &self.main
    }

    fn multifd(&self) -> &[Arc<Channel>] {
        &self.multifd
    }

    fn greet(&self) -> Result<(), MigrationError> {
        greet(&self.shared, &self.main)
    }

    fn cause(&self) -> Box<dyn Fn() -> Option<MigrationError> + Send> {
        let source = Arc::clone(&self.source);
        Box::new(move || source.check().err())
    }

    fn begins_ram_before_lanes(&self) -> bool {
        // A lane on the main connection writes PARTs of RAM, which must follow RAM's START section.
        !self.has_lanes()
    }

    fn begin_ram(&mut self) -> Result<(), MigrationError> {
        let guest_source = &self.shared.guest.source;
        self.source.start_ram(&self.main, &guest_source.blocks(), self.has_lanes())?;
        self.main.with(|stream| guest_source.send_setup(stream))
    }

    /// One lane on the main connection, or with multifd one on each lane's connection.
    fn lanes(&mut self) -> Result<Writers, MigrationError> {
        let shared = Arc::clone(&self.shared);
        let teller = Arc::clone(&self.shared);
        let warn = move |text| teller.tell(&Event::Warning(text));
        let work = Work::new(Arc::clone(&self.source), &shared.guest.ram, warn)?;
        self.work = Some(Arc::clone(&work));
        let lanes = if self.has_lanes() {
            let lanes = PacketLane::all(&work, &shared.guest.ram, &multifd_shared(&shared, &self.main));
            let ends = |lane| Ok(LaneEnds { writer: Box::new(lane), reader: shared.reader()? });
            lanes.into_iter().map(ends).collect::<Result<_, MigrationError>>()?
        } else {
            let measures = (Arc::clone(&shared.measures.counters), Arc::clone(&shared.session.limiter));
            let lane = RdmaLane::new(work, Arc::clone(&self.main), measures);
            vec![LaneEnds { writer: Box::new(lane), reader: shared.reader()? }]
        };
        Ok(Writers::new(&shared, lanes, true))
    }

    fn start_helpers(&self, workers: &mut Workers) -> Result<(), MigrationError> {
        type Run = fn(&Work, &MainChannel, &Shared) -> Result<(), MigrationError>;
        let windows: Run = match self.has_lanes() {
            true => |work, main, shared| ask_for_lanes(work, main, &shared.measures.counters),
            false => |work, _, shared| ask(work, &shared.measures.counters),
        };
        let memory: Run = |work, _, _| register(work);
        let Some(work) = &self.work else {
            return Err(MigrationError::Internal("there are no lanes to work for".to_owned()));
        };
        for (role, run) in [(ThreadRole::RdmaWindows, windows), (ThreadRole::RdmaMemory, memory)] {
            let (shared, main, work) = (Arc::clone(&self.shared), Arc::clone(&self.main), Arc::clone(work));
            workers.spawn(role, move || {
                if let Err(error) = run(&work, &main, &shared) {
                    shared.fail(error);
                }
            })?;
        }
        Ok(())
    }

    fn end_round(&self, is_last: bool) -> Result<(), MigrationError> {
        if !self.has_lanes() {
            return Ok(());
        }
        self.main.with(|stream| stream.ram_part(false, true))?;
        if is_last { Ok(()) } else { self.source.wait_for_flush(&self.main) }
    }

    fn end_ram(&self) -> Result<(), MigrationError> {
        self.source.end_ram(&self.main)
    }

    fn end(&self) -> Result<(), MigrationError> {
        self.main.with(|stream| self.shared.guest.source.send_end(stream))?;
        self.source.finish(self.shared.capabilities.return_path)
    }

    fn close(&mut self) {
        // The adapter's access ends before memory is deregistered.
        self.source.destroy();
        self.work = None;
    }
}
