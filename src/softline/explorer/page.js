// Gradio's server closes the stream of its answers when it has answered everything. An event that is sent just then
// is never answered in the page: gradio's client takes the old stream for open and does not ask for a new one. Here the
// client gets one stream that stays open, and the server's streams are read into it while an event has no answer.
//
// Gradio's page stops working if the choices of an open list become fewer, so answers wait until lists are closed.
(() => {
  const send = window.fetch.bind(window);
  const unanswered = new Set();
  let stream = null; // the client's stream and its request
  let reading = false;

  async function read() {
    if (reading) return;
    reading = true;
    while (stream !== null && unanswered.size > 0) {
      const { request, controller } = stream;
      try {
        const response = await send(request.clone());
        if (!response.ok || !(await pass(response.body, controller))) throw new TypeError("the server does not answer");
      } catch (error) {
        unanswered.clear();
        stream = null;
        // the client itself ends the stream when the page is left
        if (request.signal.aborted) controller.close();
        else controller.error(error);
      }
    }
    reading = false;
  }

  async function listsClosed() {
    while (document.querySelector("[role=listbox]")) await new Promise((done) => setTimeout(done, 50));
  }

  // passes on all messages but the last one, that the stream is closed; returns whether there were any
  async function pass(body, controller) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    const encoder = new TextEncoder();
    let [text, any] = ["", false];
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const messages = (text + part.value).split("\n\n");
      text = messages.pop();
      for (const message of messages) {
        const { msg, event_id } = JSON.parse(message.replace(/^data: */, ""));
        if (msg === "process_completed") {
          unanswered.delete(event_id);
          await listsClosed();
        }
        if (msg !== "close_stream") controller.enqueue(encoder.encode(`${message}\n\n`));
        any = true;
      }
    }
    return any;
  }

  window.fetch = async (input, options) => {
    const request = new Request(input, options);
    const { pathname } = new URL(request.url);
    if (pathname.endsWith("/queue/data")) {
      const body = new ReadableStream({ start: (controller) => (stream = { request, controller }) });
      read();
      return new Response(body, { headers: { "content-type": "text/event-stream" } });
    }
    const response = await send(request);
    if (pathname.endsWith("/queue/join") && response.ok) {
      unanswered.add((await response.clone().json()).event_id);
      read();
    }
    return response;
  };
})();
