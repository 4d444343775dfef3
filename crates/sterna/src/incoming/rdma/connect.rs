//! Decides on RDMA connect requests, and accepts the admitted ones.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sterna_transport::Channel;
use sterna_transport::rdma::Request;
use sterna_wire::rdma::{ConnectReply, Part};

use super::super::accept::{enter, greet_with, main_channel, multifd, warn};
use super::super::greeting::Greeting;
use super::super::questions;
use super::super::shared::Shared;
use super::state::Rdma;
use super::writer_request::WriterRequest;
use crate::error::{Ending, MigrationError, RdmaDifference};
use crate::rdma::{DestinationStream, LaneDestinationStream, QuestionStream};
use crate::threads::{self, ThreadRole, tried};

/// Most questions that are answered in parallel, because anyone who reaches the port may ask.
const QUESTIONS: usize = 32;

/// Warns about a refusal, unless too many were reported recently.
pub(super) fn refuse(shared: &Shared, rdma: &Rdma, text: &str) {
    match rdma.refusals.next(text) {
        Some(text) => warn(shared, &text),
        None => tracing::debug!("{text}"),
    }
}

/// A connect request that was admitted.
struct Admitted {
    request: Box<dyn Request>,
    part: Part,
    reply: ConnectReply,
    /// The number of the source to which the connection is assigned.
    source: u64,
    peer: String,
}

/// Rejects a request, or starts a thread that accepts it. Accepting may take as long as the peer likes.
pub(super) fn take(shared: &Arc<Shared>, rdma: &Arc<Rdma>, request: Box<dyn Request>) {
    let peer = format!("rdma:{}", request.peer());
    match rdma.admit(request.private_data(), shared.places.is_complete()) {
        Err(refused) => {
            // With empty private data, because a QEMU would interpret other data as a version.
            let rejected = request.reject(&[]).err().map(|error| format!(" ({error})")).unwrap_or_default();
            refuse(shared, rdma, &format!("connection refused: {peer}: {refused}{rejected}"));
        }
        Ok((part, mut reply, source)) => {
            if reply.introduction.is_some() && reply.pin_all {
                // A Sterna source understands that nothing needs to be pinned.
                reply.pin_all = !request.adapter().has_on_demand_paging();
            }
            if part == Part::Question && rdma.questions.fetch_add(1, Ordering::SeqCst) >= QUESTIONS {
                rdma.questions.fetch_sub(1, Ordering::SeqCst);
                // Dropping a request rejects it.
                return refuse(
                    shared,
                    rdma,
                    &format!("connection refused: {peer}: too many questions at once"),
                );
            }
            let admitted = Admitted { request, part, reply, source, peer };
            let (of_thread, of_rdma) = (Arc::clone(shared), Arc::clone(rdma));
            let connect = move || admitted.connect(&of_thread, &of_rdma);
            let failed = move |shared: &Shared, rdma: &Rdma, error: &MigrationError| {
                if part == Part::Question {
                    rdma.questions.fetch_sub(1, Ordering::SeqCst);
                }
                rdma.gone(part, source);
                refuse(shared, rdma, &format!("connection refused: {error}"));
            };
            // `connect` catches its own panics, so only the VMM's hook for new threads can panic.
            let (died_shared, died_rdma) = (Arc::clone(shared), Arc::clone(rdma));
            let died = move |error: MigrationError| failed(&died_shared, &died_rdma, &error);
            if let Err(error) = threads::spawn(ThreadRole::Greeter, connect, died) {
                failed(shared, rdma, &error);
            }
        }
    }
}

impl Admitted {
    fn connect(self, shared: &Arc<Shared>, rdma: &Arc<Rdma>) {
        let (part, source) = (self.part, self.source);
        let connected = tried("accepting a connection over RDMA", || match part {
            Part::Main => self.main(shared, rdma),
            Part::ReturnPath => self.return_path(shared, rdma),
            Part::Lane(_) => self.lane(shared, rdma),
            Part::Question => self.question(shared),
        });
        if part == Part::Question {
            rdma.questions.fetch_sub(1, Ordering::SeqCst);
        }
        if let Err(error) = connected {
            rdma.gone(part, source);
            refuse(shared, rdma, &format!("connection refused: {error}"));
        }
    }

    /// Accepts the main connection, and uses it as the main channel if its first bytes fit.
    fn main(self, shared: &Arc<Shared>, rdma: &Arc<Rdma>) -> Result<(), MigrationError> {
        let setup = shared.params.limits.setup;
        let limit = Greeting::limit_of(setup);
        let request =
            Box::new(WriterRequest { request: self.request, rdma: Arc::clone(rdma), source: self.source });
        let stream = DestinationStream::accept(request, &self.reply, limit, &shared.closing);
        let stream = Arc::new(stream.map_err(|error| refused(&self.peer, error))?);
        let channel = Arc::new(Channel::over(stream.clone(), self.peer));
        if !rdma.accepted_main(self.source, stream) {
            return Ok(());
        }
        enter(shared, &channel);
        greet_with(shared, channel, |shared, channel| main_channel(shared, &Greeting::new(channel, setup)));
        if !shared.places.is_complete() {
            // The next source can connect.
            rdma.gone(Part::Main, self.source);
        }
        Ok(())
    }

    /// Accepts a lane, and uses it as a multifd channel if its first bytes fit.
    fn lane(self, shared: &Arc<Shared>, rdma: &Arc<Rdma>) -> Result<(), MigrationError> {
        let setup = shared.params.limits.setup;
        let limit = Greeting::limit_of(setup);
        let gone = || RdmaDifference::NoMainConnection { peer: self.peer.clone(), part: self.part };
        rdma.wait_for_main(self.source, limit).ok_or_else(gone)?;
        let request =
            Box::new(WriterRequest { request: self.request, rdma: Arc::clone(rdma), source: self.source });
        let stream = LaneDestinationStream::accept(request, &self.reply, limit, &shared.closing);
        let stream = Arc::new(stream.map_err(|error| refused(&self.peer, error))?);
        let channel = Arc::new(Channel::over(stream.clone(), self.peer));
        if !rdma.accepted_lane(self.source, stream) {
            return Ok(());
        }
        enter(shared, &channel);
        greet_with(shared, channel, |shared, channel| multifd(shared, &Greeting::new(channel, setup)));
        Ok(())
    }

    /// Answers a question on its own connection.
    fn question(self, shared: &Arc<Shared>) -> Result<(), MigrationError> {
        let setup = shared.params.limits.setup;
        let limit = Greeting::limit_of(setup);
        let stream = QuestionStream::answer(self.request, &self.reply, limit, &shared.closing);
        let stream = stream.map_err(|error| refused(&self.peer, error))?;
        let channel = Arc::new(Channel::over(Arc::new(stream), self.peer));
        enter(shared, &channel);
        greet_with(shared, channel, |shared, channel| {
            Ok(questions::answer(shared, &Greeting::new(channel, setup))?)
        });
        Ok(())
    }

    fn return_path(self, shared: &Arc<Shared>, rdma: &Arc<Rdma>) -> Result<(), MigrationError> {
        let limit = Greeting::limit_of(shared.params.limits.setup);
        let gone = || RdmaDifference::NoMainConnection { peer: self.peer.clone(), part: self.part };
        let stream = rdma.wait_for_main(self.source, limit).ok_or_else(gone)?;
        let accepted = stream.accept_return_path(self.request, &self.reply, limit, &shared.closing);
        accepted.map_err(|error| refused(&self.peer, error))?;
        rdma.accepted_return_path();
        Ok(())
    }
}

fn refused(peer: &str, error: sterna_transport::StreamError) -> MigrationError {
    Ending::Rdma { peer: peer.to_owned(), error: Arc::new(error) }.into()
}
