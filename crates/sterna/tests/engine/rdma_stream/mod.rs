//! The stream over RDMA, on adapters inside the process.
#![allow(clippy::print_stdout, reason = "whoever reads of a failure needs the seed")]

mod broken;
mod bytes;
mod lanes;
mod phases;

use std::sync::Arc;
use std::time::Duration;

use sterna::rdma::{DestinationStream, SourceStream};
use sterna_transport::rdma::double::{Host, Network, Settings};
use sterna_transport::rdma::{ConnectParameters, Endpoint, EndpointSizes, Fabric, Listener, Request};
use sterna_transport::{CancelFlag, Channel};
use sterna_wire::rdma::{
    ChunkSize, ConnectRequest, Introduction, MESSAGE_BYTES, MessageType, Part, encode_empty,
};

const LONG: Duration = Duration::from_secs(60);
const LIMIT: Option<Duration> = Some(LONG);
const MIB: usize = 1 << 20;
const PLAIN: ConnectRequest = ConnectRequest { pin_all: false, introduction: None };

/// A Sterna's connection request.
fn introduced(part: Part) -> ConnectRequest {
    let introduction = Introduction {
        version: Introduction::VERSION,
        part,
        lanes: 0,
        chunk: ChunkSize::LEAST,
        session: [3; 16],
        nonce: [4; 16],
    };
    ConnectRequest { pin_all: false, introduction: Some(introduction) }
}

/// Two hosts; the destination listens.
struct Lab {
    network: Network,
    source: Host,
    destination: Host,
    listener: Arc<dyn Listener>,
}

/// Both ends of a stream.
struct Joined {
    source: Arc<SourceStream>,
    destination: Arc<DestinationStream>,
}

impl Lab {
    fn new(settings: Settings) -> Self {
        let network = Network::new(settings).unwrap();
        let (source, destination) =
            (network.host(&[[10, 0, 0, 1].into()]), network.host(&[[10, 0, 0, 2].into()]));
        let listener = destination.listen(([10, 0, 0, 2], 0).into(), 5).unwrap();
        Self { network, source, destination, listener }
    }

    fn join(&self, has_return_path: bool) -> Joined {
        let destination = || {
            let stream = self.accept_main();
            if has_return_path {
                let (request, reply) = self.request();
                assert!(stream.accept_return_path(request, &reply, LONG, &CancelFlag::new()).unwrap());
            }
            stream
        };
        std::thread::scope(|scope| {
            let accepted = scope.spawn(destination);
            let source = self.connect(has_return_path);
            Joined { source: Arc::new(source), destination: Arc::new(accepted.join().unwrap()) }
        })
    }

    fn connect(&self, has_return_path: bool) -> SourceStream {
        let (main, back) = (introduced(Part::Main), introduced(Part::ReturnPath));
        let (to, requests) = (self.listener.local_address(), (&main, has_return_path.then_some(&back)));
        SourceStream::connect(&self.source, to, requests, 64, LONG, &CancelFlag::new()).unwrap().0
    }

    fn accept_main(&self) -> DestinationStream {
        let (request, reply) = self.request();
        DestinationStream::accept(request, &reply, LONG, &CancelFlag::new()).unwrap()
    }

    fn request(&self) -> (Box<dyn Request>, sterna_wire::rdma::ConnectReply) {
        let request = self.listener.accept(LIMIT, &CancelFlag::new()).unwrap();
        let asked = ConnectRequest::decode(request.private_data()).unwrap();
        let reply = asked.reply(0, ChunkSize::LEAST).unwrap();
        (request, reply)
    }

    /// A destination whose connections the test controls: main connection and return path.
    fn with_plain_destination(&self) -> (SourceStream, Endpoint, Endpoint) {
        let accept = || {
            let endpoint = self.plain(self.request().0.open(&plain_sizes().attributes()).unwrap());
            let parameters = ConnectParameters::accept(b"\0\0\0\x01\0\0\0\0");
            endpoint.connection().establish(&parameters, LONG, &CancelFlag::new()).unwrap();
            endpoint
        };
        std::thread::scope(|scope| {
            let accepted = scope.spawn(|| (accept(), accept()));
            let source = self.connect(true);
            let (main, back) = accepted.join().unwrap();
            (source, main, back)
        })
    }

    /// A source whose connection the test controls.
    fn with_plain_source(&self) -> (Endpoint, DestinationStream) {
        let route = self.source.resolve(self.listener.local_address(), LONG, &CancelFlag::new()).unwrap();
        let endpoint = self.plain(route.open(&plain_sizes().attributes()).unwrap());
        std::thread::scope(|scope| {
            let accepted = scope.spawn(|| self.accept_main());
            let parameters = ConnectParameters::connect(b"\0\0\0\x01\0\0\0\0");
            endpoint.connection().establish(&parameters, LONG, &CancelFlag::new()).unwrap();
            (endpoint, accepted.join().unwrap())
        })
    }

    fn plain(&self, connection: Arc<dyn sterna_transport::rdma::Connection>) -> Endpoint {
        let endpoint = Endpoint::new(connection, &plain_sizes()).unwrap();
        endpoint.post_receives(4).unwrap();
        endpoint
    }

    /// Asserts that no resource is left. Drops everything that the test has created.
    fn assert_empty(self) {
        drop(self.listener);
        assert_eq!(self.network.leaks(), Vec::<String>::new());
    }
}

impl Joined {
    fn channels(&self) -> (Arc<Channel>, Arc<Channel>) {
        let source = Channel::over(self.source.clone(), "rdma:destination");
        (Arc::new(source), Arc::new(Channel::over(self.destination.clone(), "rdma:source")))
    }
}

fn plain_sizes() -> EndpointSizes {
    EndpointSizes::messages(MESSAGE_BYTES as u32, 4, 4)
}

fn empty(kind: MessageType) -> Vec<u8> {
    let mut message = Vec::new();
    encode_empty(kind, 1, &mut message).unwrap();
    message
}
