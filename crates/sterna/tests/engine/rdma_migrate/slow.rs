//! Zero pages are sent in packets, which the destination's threads must process. WRITEs need no thread of the
//! destination. Therefore the next round must not begin before the destination has processed the zero pages of the
//! last one.

use std::net::SocketAddr;
use std::time::Instant;

use super::*;
use sterna_transport::CancelFlag;
use sterna_transport::rdma::{
    Adapter, AdapterInfo, Completion, ConnectParameters, Connection, Event, Listener, Piece, Queue,
    QueuePairAttributes, RdmaError, Request, Route, SendRequest, Wake,
};

/// Long compared with the time from the end of one round to the WRITEs of the next.
const DELAY: Duration = Duration::from_millis(10);
/// Minimum length of the lanes' packets. Messages of other connections are shorter at this stage.
const PACKET: u32 = 400;

/// A host that sleeps before it receives a message as long as a packet.
#[derive(Debug)]
struct Slow(Host);

#[derive(Debug)]
struct SlowListener(Arc<dyn Listener>);

#[derive(Debug)]
struct SlowRequest(Box<dyn Request>);

#[derive(Debug)]
struct SlowConnection(Arc<dyn Connection>);

impl Fabric for Slow {
    fn adapters(&self) -> Result<Vec<AdapterInfo>, RdmaError> {
        self.0.adapters()
    }
    fn listen(&self, address: SocketAddr, backlog: u32) -> Result<Arc<dyn Listener>, RdmaError> {
        Ok(Arc::new(SlowListener(self.0.listen(address, backlog)?)))
    }
    fn resolve(
        &self,
        address: SocketAddr,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<Box<dyn Route>, RdmaError> {
        self.0.resolve(address, limit, cancel)
    }
}

impl Listener for SlowListener {
    fn local_address(&self) -> SocketAddr {
        self.0.local_address()
    }
    fn accept(&self, limit: Option<Duration>, cancel: &CancelFlag) -> Result<Box<dyn Request>, RdmaError> {
        Ok(Box::new(SlowRequest(self.0.accept(limit, cancel)?)))
    }
    fn close(&self) {
        self.0.close();
    }
}

impl Request for SlowRequest {
    fn adapter(&self) -> Arc<dyn Adapter> {
        self.0.adapter()
    }
    fn peer(&self) -> SocketAddr {
        self.0.peer()
    }
    fn private_data(&self) -> &[u8] {
        self.0.private_data()
    }
    fn reject(self: Box<Self>, private_data: &[u8]) -> Result<(), RdmaError> {
        self.0.reject(private_data)
    }
    fn open(self: Box<Self>, attributes: &QueuePairAttributes) -> Result<Arc<dyn Connection>, RdmaError> {
        Ok(Arc::new(SlowConnection(self.0.open(attributes)?)))
    }
}

impl Connection for SlowConnection {
    fn adapter(&self) -> Arc<dyn Adapter> {
        self.0.adapter()
    }
    fn peer(&self) -> SocketAddr {
        self.0.peer()
    }
    fn establish(
        &self,
        parameters: &ConnectParameters<'_>,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<Vec<u8>, RdmaError> {
        self.0.establish(parameters, limit, cancel)
    }
    fn post_receive(&self, id: u64, into: Piece) -> Result<(), RdmaError> {
        self.0.post_receive(id, into)
    }
    fn post_send(&self, requests: &[SendRequest]) -> Result<(), RdmaError> {
        self.0.post_send(requests)
    }
    fn poll(&self, queue: Queue, to: &mut Vec<Completion>, most: usize) -> Result<usize, RdmaError> {
        let polled = self.0.poll(queue, to, most)?;
        let packets = to.iter().rev().take(polled).filter(|completion| completion.bytes >= PACKET).count();
        if queue == Queue::Receive {
            std::thread::sleep(DELAY * packets as u32);
        }
        Ok(polled)
    }
    fn wait(&self, queue: Queue, deadline: Option<Instant>, cancel: &CancelFlag) -> Result<Wake, RdmaError> {
        self.0.wait(queue, deadline, cancel)
    }
    fn set_remote_write(&self, allowed: bool) -> Result<(), RdmaError> {
        self.0.set_remote_write(allowed)
    }
    fn poll_event(&self) -> Option<Event> {
        self.0.poll_event()
    }
    fn end(&self) -> Option<Event> {
        self.0.end()
    }
    fn disconnect(&self) {
        self.0.disconnect();
    }
    fn destroy(&self) {
        self.0.destroy();
    }
}

#[test]
fn zeros_of_a_round_never_clear_what_the_next_round_has_written() {
    for (lanes, on_demand_paging) in [(2, false), (2, true), (4, true)] {
        println!("{lanes} lanes, on demand: {on_demand_paging}");
        let mut settings = Settings::seeded(51);
        settings.on_demand_paging = on_demand_paging;
        let mut lab = Lab::new(settings);
        lab.destination_fabric = Arc::new(Slow(lab.destination.clone()));
        let capabilities = Capabilities { multifd: true, ..Capabilities::default() };
        // Half of the pages are zero in the first round. The guest writes them in the next.
        let run = lab.start(&writer(20_000), capabilities, |params| {
            params.multifd_channels = lanes;
            params.downtime_limit = Duration::ZERO;
        });
        while run.migration.statistics().rounds_begun < 4 && run.migration.outcome().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }

        // Every page has the guest's last content.
        let (_, run) = run.finish(Duration::ZERO);

        drop(run);
        lab.assert_empty();
    }
}
