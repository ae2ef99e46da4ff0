/* Browsers run no web worker for a page opened from the disk; the site's search is one. There, a worker's script runs
   in a hidden frame instead, with the same messages. Pages from a server keep the browser's own workers. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      this.onmessage = null
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.documentElement.append(this.frame)
      const inner = this.frame.contentWindow
      // what the script posts goes to the page; what it loads, it loads in order
      inner.postMessage = (data) => this.deliver(this, data)
      inner.importScripts = async (...addresses) => {
        for (const each of addresses) await this.load(each)
      }
      this.load(address).then(() => {
        this.ready = true
        this.waiting.forEach((data) => this.deliver(inner, data))
      })
    }

    load(address) {
      const document = this.frame.contentDocument
      const script = document.createElement("script")
      script.src = address
      return new Promise((resolve, reject) => {
        script.onload = resolve
        script.onerror = reject
        document.head.append(script)
      })
    }

    deliver(target, data) {
      setTimeout(() => target.dispatchEvent(new MessageEvent("message", { data })))
    }

    postMessage(data) {
      if (this.ready) this.deliver(this.frame.contentWindow, data)
      else this.waiting.push(data)
    }

    terminate() {
      this.frame.remove()
    }
  }
}
